"""What the command line decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from farandole import _C


def built_programs() -> Path:
    """Where the C++ benchmarks are when the package is a build tree's."""
    return Path(_C.__file__).resolve().parents[2] / "tests" / "perf"


@dataclass(frozen=True)
class Settings:
    """One invocation.

    Args:
        rounds: how often all peers take their turn.
        effort: 1 for figures to quote; less repeats everything less often.
        programs: folder of the C++ programs.
        mpi: prefix of an environment with Intel MPI; None measures without it.
        tick: called as work is done, with the share of a whole subject.
    """

    rounds: int = 9
    effort: float = 1.0
    programs: Path = Path()
    mpi: Path | None = None
    tick: Callable[[], None] = lambda: None

    def count(self, full: int) -> int:
        """How many repetitions for this effort, of so many for the full one."""
        return max(2, round(full * self.effort))
