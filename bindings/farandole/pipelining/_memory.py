"""What a step holds in memory, over time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farandole import _C


@dataclass(frozen=True)
class MemoryCurve:
    """What one rank holds during a step.

    Attributes:
        points: (seconds from the step's beginning, bytes held from then on until the next point).
            Of points at one time the last one stays.
        peak: the most bytes held at a time.
    """

    points: tuple[tuple[float, float], ...]
    peak: float


def memory_over_time(step: _C.SimulationResult, memory: Sequence[Sequence[float]]) -> list[MemoryCurve]:
    """What each rank holds during a simulated or measured step.

    A forward takes memory when it begins; B, I and W free it when they are done. A forward-only step holds nothing.

    Args:
        step: of :func:`simulate` or :func:`gather_timeline`.
        memory: per stage, in bytes, what a microbatch holds from its forward to its B or I, and what is left of that
            from its I to its W, as in :func:`auto_plan`, whose peaks are the same.

    Raises:
        ValueError: memory lacks a stage of the step, or has not two numbers for a stage.
    """
    for stage in memory:
        if len(stage) != 2:
            raise ValueError(f"memory has {len(stage)} numbers for a stage, expected 2")
    curves = _C.memory_over_time(step, [(float(held), float(left)) for held, left in memory])
    return [MemoryCurve(tuple(points), peak) for points, peak in curves]
