"""Peers that do the same operation, at several sizes, in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from farandole.bench._ranks import Ranks
from farandole.bench._series import Report, Sample, Series, interleave, size_name
from farandole.bench._settings import Settings

SAMPLES = 3
# Memory that is new is in no cache: 16 MiB are there after as many runs.
_FEWEST_WARM_UPS = 3


@dataclass(frozen=True)
class Repeat:
    """What a peer is asked for in its turn."""

    size: int  # bytes
    warm_up: int  # runs that are not timed
    count: int  # runs of one sample
    samples: int


Peer = Callable[[Repeat], list[Sample]]


def on_ranks(ranks: Ranks, function: Callable[..., list[Sample]], **kwargs: Any) -> Peer:
    """The peer that runs ``function(rank, size, warm_up, count, samples, **kwargs)`` on all ranks."""

    def measure(repeat: Repeat) -> list[Sample]:
        return slowest(ranks.call(function, **asdict(repeat), **kwargs))

    return measure


def slowest(by_rank: Sequence[Sequence[Sample]]) -> list[Sample]:
    """An operation of several ranks takes as long as it takes on the slowest one."""
    return [max(samples) for samples in zip(*by_rank, strict=True)]


def usual_count(size: int) -> int:
    return max(4, min(400, 2**24 // size))


def measure_peers(
    report: Report,
    settings: Settings,
    peers: Mapping[str, Peer],
    sizes: Sequence[int],
    *,
    case: str = "{}",
    count: Callable[[int], int] = usual_count,
    samples: int = SAMPLES,
) -> dict[int, dict[str, Series]]:
    """Measures every peer at every size, adds the series to the report and returns them by size and peer.

    Args:
        case: names a row, with the size for the braces.
        count: runs of one sample at a size, at full effort.
        samples: per turn.
    """
    result = {}
    for size in sizes:
        runs = settings.count(count(size))
        repeat = Repeat(size, max(_FEWEST_WARM_UPS, runs // 10), runs, samples)
        series = {name: Series(case.format(size_name(size)), name) for name in peers}
        interleave(
            settings.rounds,
            [([series[name]], partial(_one_series, peer, repeat)) for name, peer in peers.items()],
            settings.tick,
        )
        report.series += series.values()
        result[size] = series
    return result


def _one_series(peer: Peer, repeat: Repeat) -> list[list[Sample]]:
    return [peer(repeat)]
