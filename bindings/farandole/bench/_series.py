"""What a benchmark hands over: samples in rounds, ratios between them, targets to meet."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple


class Sample(NamedTuple):
    """Many repetitions of one operation. The median is its cost; the mean holds what the machine did meanwhile."""

    median: float
    mean: float


@dataclass
class Series:
    """One peer at one case: a list of samples per round."""

    case: str  # "8 B"
    peer: str  # "gloo"
    quantity: str = "median"  # what is measured, where a peer has several
    unit: str = "s"  # or "ratio"
    bytes_each_way: int | None = None  # with it, a bandwidth is shown too
    rounds: list[list[Sample]] = field(default_factory=list)

    def round_medians(self) -> list[float]:
        return [statistics.median(sample.median for sample in samples) for samples in self.rounds]

    def median(self) -> float:
        return statistics.median(self.round_medians())

    def spread(self) -> float:
        """Half the range of the middle half of all samples, relative to the median."""
        values = sorted(sample.median for samples in self.rounds for sample in samples)
        if len(values) < 2:
            return 0.0
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return (high - low) / 2 / self.median()


@dataclass
class Ratio:
    """How two series compare; over rounds, since both saw the same machine in each."""

    case: str
    name: str  # "gloo / farandole"
    over: Series
    under: Series
    unit: ClassVar[str] = "ratio"

    def median(self) -> float:
        return statistics.median(self._of(*pair) for pair in self._rounds())

    def _of(self, over: float, under: float) -> float:
        return over / under

    def _rounds(self) -> list[tuple[float, float]]:
        return list(zip(self.over.round_medians(), self.under.round_medians(), strict=True))


class Excess(Ratio):
    """How much more one series is than the other, in its own unit."""

    unit = "s"

    def _of(self, over: float, under: float) -> float:
        return over - under


@dataclass
class ExcessOverSum(Excess):
    """How much more one series is than two others together."""

    other: Series = field(kw_only=True)

    def median(self) -> float:
        others = self.other.round_medians()
        return statistics.median(
            over - under - other for (over, under), other in zip(self._rounds(), others, strict=True)
        )


@dataclass
class ExcessRatio(Ratio):
    """How much more one series is than a floor, relative to another one."""

    floor: Series = field(kw_only=True)

    def median(self) -> float:
        floors = self.floor.round_medians()
        return statistics.median(
            (over - floor) / under for (over, under), floor in zip(self._rounds(), floors, strict=True)
        )


@dataclass
class Target:
    """A figure to reach: at most, or at least, the limit."""

    name: str
    measured: float
    limit: float
    at_most: bool
    unit: str = "ratio"  # or "s", or "share"

    def met(self) -> bool:
        return self.measured <= self.limit if self.at_most else self.measured >= self.limit


class Skipped(Exception):
    """A subject cannot be measured here; the message says why."""


@dataclass
class Report:
    """All of one subject."""

    subject: str
    title: str
    series: list[Series] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    peers_as_rows: bool = False  # where they are many; with several quantities they are anyhow
    notes: list[str] = field(default_factory=list)  # what a reader of the table must know


Measurement = tuple[Sequence[Series], Callable[[], Sequence[Sequence[Sample]]]]


def interleave(rounds: int, measurements: Sequence[Measurement], tick: Callable[[], None]) -> None:
    """Runs all measurements in turn, round after round.

    Args:
        measurements: the series that one measurement fills, and the function that returns
            this round's samples for each of them.
        tick: called after each.
    """
    for _ in range(rounds):
        for series, measure in measurements:
            for one, samples in zip(series, measure(), strict=True):
                one.rounds.append(list(samples))
            tick()


def ratio(name: str, over: Series, under: Series) -> Ratio:
    return Ratio(over.case, name, over, under)


def excess(name: str, over: Series, under: Series) -> Excess:
    return Excess(over.case, name, over, under)


def excess_over_sum(name: str, over: Series, under: Series, other: Series) -> ExcessOverSum:
    return ExcessOverSum(over.case, name, over, under, other=other)


def excess_ratio(name: str, over: Series, floor: Series, under: Series) -> ExcessRatio:
    return ExcessRatio(over.case, name, over, under, floor=floor)


def size_name(size: int) -> str:
    for unit, factor in (("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size // factor} {unit}"
    return f"{size} B"
