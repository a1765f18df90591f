"""What is pipelined of a model, on all ranks alike: each has looked at its own forward, which may be another one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TypeVar

from farandole.sparse._input_graph import InputGraph
from farandole.sparse._input_hooks import RecordedInputs
from farandole.sparse._tracer import CannotTrace
from farandole.sparse._verdict import Refusal, Verdict, refused

_MISSING = Refusal(None, "the model has no such module", "Let all ranks have the same sharded modules")

Graph = TypeVar("Graph", InputGraph, RecordedInputs)


@dataclass(frozen=True)
class Findings:
    """Of one rank."""

    tracing: str | None  # as it was asked for
    is_strict: bool
    untraced: str = ""  # why fx cannot trace the model
    error: str = ""  # what else came in the way
    names: tuple[str, ...] = ()  # of what might go ahead, in call order
    verdicts: tuple[Verdict, ...] = ()

    def word(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_word(word: str) -> Findings:
        said = json.loads(word)
        verdicts = tuple(Verdict(**verdict) for verdict in said.pop("verdicts"))
        return Findings(**said | {"names": tuple(said["names"]), "verdicts": verdicts})


def findings(
    tracing: str | None,
    is_strict: bool,
    graph: InputGraph | RecordedInputs | None = None,
    error: Exception | None = None,
) -> Findings:
    """Those of this rank; ``error`` is what tracing has raised."""
    found = Findings(tracing, is_strict)
    if isinstance(error, CannotTrace):
        return replace(found, untraced=str(error))
    if error is not None:
        return replace(found, error=f"{type(error).__name__}: {error}")
    return found if graph is None else replace(found, names=graph.names, verdicts=graph.verdicts)


def refuse_unattachable(found: Mapping[int, Findings], error: Exception | None) -> None:
    """
    Args:
        found: by rank.
        error: what tracing has raised here.

    Raises:
        ValueError: the ranks have asked for different things.
        Exception: tracing has failed on some rank, and hooks are not to take its place; here it is this rank's own.
    """
    asked = {each.tracing for each in found.values()}
    if len(asked) > 1:
        said = ", ".join(f"{each.tracing!r} on rank {rank}" for rank, each in found.items())
        raise ValueError(f"tracing={said}: expected the same on all ranks")
    failed = _by_rank({rank: each.error for rank, each in found.items()})
    untraced = _by_rank({rank: each.untraced for rank, each in found.items()}) if asked == {"fx"} else ""
    if not failed and not untraced:
        return
    if error is not None:
        raise error
    raise RuntimeError(f"the model cannot be attached\n{failed}") if failed else CannotTrace(untraced)


def untraced_on(found: Mapping[int, Findings], rank: int) -> tuple[str, bool]:
    """Why the model is left to hooks, as this rank is to say it, and whether other ranks could have traced it; empty
    where nothing came in the way of fx."""
    reasons = {rank: each.untraced for rank, each in found.items()}
    text = _by_rank(reasons)
    return (reasons[rank], False) if all(reasons.values()) else (text, bool(text))


def strict_on(found: Mapping[int, Findings]) -> str | None:
    """Who asks that a sharded module which cannot be pipelined is an error, where not all ranks do; None for nobody."""
    ranks = [str(rank) for rank, each in found.items() if each.is_strict]
    if not ranks:
        return None
    return "" if len(ranks) == len(found) else f" (strict=True on rank {', '.join(ranks)})"


def agreed(graph: Graph, found: Mapping[int, Findings]) -> Graph:
    """Of this rank's what goes ahead on all ranks, in the order of the first; its verdicts say what others object to."""
    first, *others = found.values()
    names = [name for name in first.names if all(name in other.names for other in others)]
    verdicts = graph.verdicts
    left = graph.only(names)
    left.verdicts = _joint(verdicts, found)
    return left


def _joint(verdicts: Sequence[Verdict], found: Mapping[int, Findings]) -> tuple[Verdict, ...]:
    of_ranks = {rank: {verdict.module: verdict for verdict in each.verdicts} for rank, each in found.items()}
    return tuple(
        _of_all(verdict, {rank: of.get(verdict.module) for rank, of in of_ranks.items()}) for verdict in verdicts
    )


def _of_all(verdict: Verdict, by_rank: Mapping[int, Verdict | None]) -> Verdict:
    left = {rank: each for rank, each in by_rank.items() if each is None or not each.pipelined}
    if len(left) in (0, len(by_rank)):
        return verdict
    first = next(iter(left.values())) or refused(verdict.module, _MISSING)
    return replace(first, reason=f"on rank {', '.join(map(str, left))}: {first.reason}")


def _by_rank(reasons: Mapping[int, str]) -> str:
    return "\n".join(f"rank {rank}: {reason}" for rank, reason in reasons.items() if reason)
