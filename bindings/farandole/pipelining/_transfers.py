"""How long messages between stages take, as the planning functions are told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Transfers:
    """Seconds that messages are on their way, for :func:`simulate` and :func:`auto_plan`.

    Args:
        by_edge: for (from, to), stages, those with the output of one and those with its gradient.
        other: over edges that are not named.
    """

    by_edge: Mapping[tuple[int, int], tuple[float, float]] = field(default_factory=dict)
    other: float = 0.0


def as_tuple(transfer: float | Transfers) -> tuple[float, list[tuple[int, int, float, float]]]:
    """As C++ takes it."""
    if not isinstance(transfer, Transfers):
        return float(transfer), []
    return transfer.other, [(*edge, *seconds) for edge, seconds in sorted(transfer.by_edge.items())]
