"""What is known of each sharded module's inputs, and the inputs themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

# (args, kwargs) of each pipelined module, in the order of the graph's names.
Inputs = list[tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass(frozen=True)
class Refusal:
    """Why inputs cannot be computed ahead of the model's forward, where, and what would change that."""

    node: str | None
    reason: str
    remedy: str


@dataclass(frozen=True)
class Verdict:
    """Of one sharded module: whether its inputs can be computed ahead of the model's forward.

    ``node`` is that of its call, or that which stands in the way; None where there is no graph.
    """

    module: str
    pipelined: bool
    node: str | None = None
    reason: str = ""
    remedy: str = ""

    def __str__(self) -> str:
        name = self.module or "the model itself"
        if self.pipelined:
            return f"{name}: pipelined"
        at = f" (at {self.node})" if self.node else ""
        return f"{name}: not pipelined: {self.reason}{at}. {self.remedy}."


def refused(module: str, refusal: Refusal) -> Verdict:
    return Verdict(module, False, refusal.node, refusal.reason, refusal.remedy)


NEVER_CALLED = Refusal(None, "forward never calls it", "Call it in the model's forward, or leave it out of the model")
WHOLE_MODEL = Refusal(None, "it is the whole model", "Call it in the forward of a module that computes the loss")

OBJECT_POOL = Refusal(
    None,
    "one of torchrec's object pools looks up in one piece",
    "It stays in the forward, and strict=True refuses it",
)


def no_inputs(node: str | None) -> Refusal:
    return Refusal(node, "it is called without inputs", "Give it its part of the batch as an argument")


def called_again(nodes: Iterable[str], times: int) -> Refusal:
    return Refusal(
        ", ".join(nodes) or None,
        f"one forward calls it {times} times",
        "Join its inputs and call it once, or give each call a sharded module of its own",
    )
