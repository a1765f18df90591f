"""What a picture of a step shows of each rank: boxes in tracks."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from farandole import _C
from farandole._trace_events import lanes

COMPUTE_KINDS = ("F", "B", "I", "W", "OVERLAP_F_B")
COMMUNICATION = "communication"

_PLAIN = re.compile(r"(\d+)([A-Z_]+?)(\d*)([<>]\d+)?")  # of messages the last may name the other stage
_COMPOSITE = re.compile(r"\((.*)\)([A-Z0-9_]+)")


class Action(NamedTuple):
    """The text of an action, taken apart; of a composite one stage and microbatch are its first part's."""

    kind: str
    stage: int
    microbatch: int | None
    parts: tuple[Action, ...] = ()


class Box(NamedTuple):
    """Something that lasts, from start to end in seconds."""

    name: str  # the whole text of the action: "2F0"
    label: str  # what there may be room for: "F0"
    kind: str  # one of COMPUTE_KINDS, or COMMUNICATION
    chunk: int  # which of the rank's stages, from 0
    start: float
    end: float


@dataclass(frozen=True)
class Rows:
    """One rank: its compute actions, and its communication in as many lanes as run at a time."""

    num_chunks: int
    compute: list[Box]
    lanes: list[list[Box]]


def parse(text: str) -> Action:
    composite = _COMPOSITE.fullmatch(text)
    if composite:
        parts = tuple(parse(part) for part in composite[1].split(";"))
        return Action(composite[2], parts[0].stage, parts[0].microbatch, parts)
    plain = _PLAIN.fullmatch(text)
    if plain is None:
        raise ValueError(f"action {text!r} has neither the form of '2F0' nor of '(2F0;3B1)OVERLAP_F_B'")
    return Action(plain[2], int(plain[1]), int(plain[3]) if plain[3] else None)


def rows_of(step: _C.SimulationResult) -> list[Rows]:
    """One for each rank.

    Communication is, of a simulated step, each message from when it is sent to when it arrives, on the rank that
    receives it, and each wait for sends; of a measured one, the calls that post and wait.
    """
    communication: list[list[Box]] = [[] for _ in step.ranks]
    for name, sender, receiver, sent, arrived in _C.timed_messages(step):
        label = f"{name} from rank {sender}"
        communication[receiver].append(Box(name, label, COMMUNICATION, 0, sent, arrived))
    rows = []
    for rank, boxes in zip(step.ranks, communication, strict=True):
        timed = [(text, parse(text), start, end) for text, start, end in rank.actions]
        stages = {one.stage for _, action, _, _ in timed if action.kind in COMPUTE_KINDS for one in _leaves(action)}
        chunks = {stage: chunk for chunk, stage in enumerate(sorted(stages))}
        compute = []
        for text, action, start, end in timed:
            if action.kind in COMPUTE_KINDS:
                compute.append(Box(text, _label(action), action.kind, chunks[action.stage], start, end))
            elif end > start:
                boxes.append(Box(text, text, COMMUNICATION, 0, start, end))
        rows.append(Rows(max(1, len(stages)), compute, lanes(boxes)))
    return rows


def _leaves(action: Action) -> tuple[Action, ...]:
    return action.parts or (action,)


def _label(action: Action) -> str:
    return " ".join(f"{leaf.kind}{leaf.microbatch}" for leaf in _leaves(action))
