"""Half a round trip of a message between two processes.

The paths, from the wire up: the floor (``ucx_perftest``); C++ through messages that are made once and started again
and again, which is how a pipeline sends; C++ through the virtual methods of ``c10d::Backend``; C++ through
``c10d::ProcessGroup``, which adds torch's dispatcher; Python, ``dist.send`` and ``dist.recv``. The last two are
also measured over a backend that moves nothing (in Python torch's "fake"): that is what c10d itself costs per call,
and "over no-op" what farandole adds to it, the message included; "over no-op + floor" is what it adds to both.
c10d::Backend may take 1.6 x the floor, or 150 ns more where that is more.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from farandole.bench._programs import CppPair, PerfTest
from farandole.bench._ranks import Rank, RankPair
from farandole.bench._series import (
    Excess,
    Ratio,
    Report,
    Sample,
    Series,
    Target,
    excess,
    excess_over_sum,
    interleave,
    ratio,
    size_name,
)
from farandole.bench._settings import Settings
from farandole.bench._timing import time_each

_SAMPLES = 3
# Bytes, and round trips per sample: native, Python.
_SMALL, _LARGE = 8, 64 * 2**20
_MIDDLE = (16 * 2**10, 2**20)
_CASES = [(_SMALL, 10_000, 1_000), (_MIDDLE[0], 2_000, 500), (_MIDDLE[1], 200, 100), (_LARGE, 4, 4)]
_NOOPS = ["C++ ProcessGroup no-op", "Python fake"]
_PEERS = [
    "ucx_perftest",
    "C++ repeated",
    "C++ Backend",
    "C++ ProcessGroup",
    "C++ ProcessGroup no-op",
    "Python farandole",
    "Python gloo",
    "Python fake",
]


def ping_pong(rank: Rank, backend: str, size: int, warm_up: int, count: int, samples: int) -> list[Sample]:
    """Runs on both ranks."""
    group = rank.groups[backend]
    outgoing = torch.randint(256, (size,), dtype=torch.uint8)
    incoming = torch.empty_like(outgoing)
    peer = rank.peer
    send, recv = dist.send, dist.recv

    def first() -> None:
        send(outgoing, peer, group)
        recv(incoming, peer, group)

    def second() -> None:
        recv(incoming, peer, group)
        send(incoming, peer, group)

    operation: Callable[[], None] = first if rank.rank == 0 else second
    for _ in range(warm_up):
        operation()
    result = time_each(operation, count, samples, parts=2)
    if rank.rank == 0 and backend != "fake" and not torch.equal(incoming, outgoing):
        raise RuntimeError(f"{backend}: rank 0 got back other bytes than it sent")
    return result


def measure(settings: Settings, pair: RankPair) -> Report:
    report = Report("point_to_point", "Half round trip between 2 processes", peers_as_rows=True)
    perftest = PerfTest()
    measured: dict[int, dict[str, Series]] = {}
    with CppPair(settings.programs) as cpp:

        def native(size: int, count: int) -> list[list[Sample]]:
            # One sample for each start of ucx_perftest: it is slow to connect, and steady.
            return [[perftest.half_round_trip(size, max(2, count // 10), count)]]

        def through_cpp(path: str, size: int, count: int) -> list[list[Sample]]:
            return [cpp.half_round_trip(path, size, max(2, count // 10), count, _SAMPLES)]

        def through_python(backend: str, size: int, count: int) -> list[list[Sample]]:
            warm_up = max(2, count // 10)
            return [pair.call(ping_pong, backend=backend, size=size, warm_up=warm_up, count=count, samples=_SAMPLES)[0]]

        for size, native_count, python_count in _CASES:
            few, many = settings.count(python_count), settings.count(native_count)
            series = _series_of(size)
            interleave(
                settings.rounds,
                [
                    ([series["ucx_perftest"]], partial(native, size, many)),
                    ([series["C++ repeated"]], partial(through_cpp, "repeated", size, many)),
                    ([series["C++ Backend"]], partial(through_cpp, "backend", size, many)),
                    ([series["C++ ProcessGroup"]], partial(through_cpp, "group", size, many)),
                    ([series["C++ ProcessGroup no-op"]], partial(through_cpp, "noop", size, many)),
                    ([series["Python farandole"]], partial(through_python, "farandole", size, few)),
                    ([series["Python gloo"]], partial(through_python, "gloo", size, few)),
                    ([series["Python fake"]], partial(through_python, "fake", size, few)),
                ],
                settings.tick,
            )
            report.series += series.values()
            measured[size] = series
    small, large = _comparisons(measured[_SMALL]), _comparisons(measured[_LARGE])
    middle = {size: _comparisons(measured[size]) for size in _MIDDLE}
    costs = _costs_over(measured[_SMALL])
    report.ratios += [*small, *costs, *(one for several in middle.values() for one in several), *large]
    repeated, _, above_gloo = small
    over_wire, _, over_both, over_fake = costs
    allowed = max(0.15e-6, 0.6 * measured[_SMALL]["ucx_perftest"].median())
    report.targets = [
        Target("C++ repeated message at 8 B / ucx_perftest", repeated.median(), 1.35, at_most=True),
        Target("C++ through Backend at 8 B, over ucx_perftest", over_wire.median(), allowed, at_most=True, unit="s"),
        Target(
            "C++ through ProcessGroup at 8 B, over no-op + floor", over_both.median(), 0.2e-6, at_most=True, unit="s"
        ),
        Target("Python send/recv at 8 B, times faster than gloo", above_gloo.median(), 2.5, at_most=False),
        Target("Python send/recv at 8 B, over fake", over_fake.median(), 3e-6, at_most=True, unit="s"),
        *(
            Target(f"C++ through Backend at {size_name(size)} / ucx_perftest", several[1].median(), 1.0, at_most=True)
            for size, several in middle.items()
        ),
        Target("C++ through Backend at 64 MiB / ucx_perftest", large[1].median(), 1.05, at_most=True),
    ]
    return report


def _series_of(size: int) -> dict[str, Series]:
    large = size >= 2**20
    return {
        peer: Series(size_name(size), peer, bytes_each_way=size if large and peer not in _NOOPS else None)
        for peer in _PEERS
    }


def _comparisons(series: dict[str, Series]) -> list[Ratio]:
    return [
        ratio("/ ucx_perftest", series["C++ repeated"], series["ucx_perftest"]),
        ratio("/ ucx_perftest", series["C++ Backend"], series["ucx_perftest"]),
        ratio("/ farandole", series["Python gloo"], series["Python farandole"]),
    ]


def _costs_over(series: dict[str, Series]) -> list[Excess]:
    group, noop = series["C++ ProcessGroup"], series["C++ ProcessGroup no-op"]
    return [
        excess("over ucx_perftest", series["C++ Backend"], series["ucx_perftest"]),
        excess("over no-op", group, noop),
        excess_over_sum("over no-op + floor", group, noop, series["ucx_perftest"]),
        excess("over no-op", series["Python farandole"], series["Python fake"]),
    ]
