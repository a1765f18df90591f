"""What pictures of steps say in words, and the pictures that are words."""

from __future__ import annotations

from collections.abc import Mapping

from farandole import _C

# One step, or several under their names, which are drawn above each other on one scale.
Steps = _C.SimulationResult | Mapping[str, _C.SimulationResult]


def named(steps: Steps) -> dict[str, _C.SimulationResult]:
    found = dict(steps) if isinstance(steps, Mapping) else {"": steps}
    if not found:
        raise ValueError("steps is empty, expected at least one step")
    return found


def seconds_text(seconds: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= scale or seconds == 0:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-6:.4g} us"


def bytes_text(count: float) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= scale:
            return f"{count / scale:.4g} {unit}"
    return f"{count:.4g} B"


def captions(steps: Mapping[str, _C.SimulationResult]) -> list[str]:
    """A line for each step; from the second one on with its differences to the first."""
    lines = []
    first = next(iter(steps.values()))
    for index, (name, step) in enumerate(steps.items()):
        line = f"{name}: " if name else ""
        line += f"step {seconds_text(step.makespan)}, bubble {100 * step.bubble:.1f}%"
        if index > 0:
            longer = f"step {100 * (step.makespan / first.makespan - 1):+.1f}%, " if first.makespan > 0 else ""
            line += f" ({longer}bubble {100 * (step.bubble - first.bubble):+.1f} points)"
        lines.append(line)
    return lines


def draw_text(steps: Steps, columns: int = 100) -> str:
    """A text picture of one or several steps: a row for each rank, each compute action as wide as it lasts.

    Args:
        steps: a step, or {"predicted": ..., "measured": ...}, drawn on one time scale, one above the other for each
            rank. The caption has the others' differences to the first.
        columns: the width of the longest step, in characters.
    """
    shown = named(steps)
    longest = max(step.makespan for step in shown.values())
    width = max(len(name) for name in shown)
    rows = {}
    for name, step in shown.items():
        share = step.makespan / longest if longest > 0 else 1.0
        rows[name] = step.draw(max(1, round(columns * share))).splitlines()[1:]
    lines = captions(shown)
    for rank in range(max(len(step.ranks) for step in shown.values())):
        lines += [f"{name:{width}} {drawn[rank]}".lstrip() for name, drawn in rows.items() if rank < len(drawn)]
    return "\n".join(lines) + "\n"
