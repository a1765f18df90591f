"""Half a round trip of a message between two processes.

From the floor of the wire (``ucx_perftest``), through C++ (the virtual ``c10d::Backend::send`` and
``recv``), to Python (``dist.send`` and ``dist.recv``) over farandole, gloo and torch's no-op backend
"fake". The last moves nothing: it is what c10d itself costs per call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from farandole.bench._programs import CppPair, PerfTest
from farandole.bench._ranks import Rank, RankPair
from farandole.bench._series import Report, Sample, Series, Target, interleave, ratio, size_name
from farandole.bench._settings import Settings
from farandole.bench._timing import time_each

_SAMPLES = 3
# Bytes, and round trips per sample: native, Python.
_CASES = [(8, 10_000, 1_000), (64 * 2**20, 4, 4)]
_PEERS = ["ucx_perftest", "C++ farandole", "Python farandole", "Python gloo", "Python fake"]


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
    report = Report("point_to_point", "Half round trip between 2 processes")
    perftest = PerfTest()
    with CppPair(settings.programs) as cpp:

        def native(size: int, count: int) -> list[list[Sample]]:
            # One sample for each start of ucx_perftest: it is slow to connect, and steady.
            return [[perftest.half_round_trip(size, max(2, count // 10), count)]]

        def through_cpp(size: int, count: int) -> list[list[Sample]]:
            return [cpp.half_round_trip(size, max(2, count // 10), count, _SAMPLES)]

        def through_python(backend: str, size: int, count: int) -> list[list[Sample]]:
            warm_up = max(2, count // 10)
            return [pair.call(ping_pong, backend=backend, size=size, warm_up=warm_up, count=count, samples=_SAMPLES)[0]]

        for size, native_count, python_count in _CASES:
            few, many = settings.count(python_count), settings.count(native_count)
            large = size >= 2**20
            series = [
                Series(size_name(size), peer, bytes_each_way=size if large and "fake" not in peer else None)
                for peer in _PEERS
            ]
            interleave(
                settings.rounds,
                [
                    ([series[0]], partial(native, size, many)),
                    ([series[1]], partial(through_cpp, size, many)),
                    ([series[2]], partial(through_python, "farandole", size, few)),
                    ([series[3]], partial(through_python, "gloo", size, few)),
                    ([series[4]], partial(through_python, "fake", size, few)),
                ],
                settings.tick,
            )
            wire, in_cpp, ours, gloo, _ = series
            report.series += series
            report.ratios += [ratio("C++ / ucx_perftest", in_cpp, wire), ratio("gloo / farandole", gloo, ours)]
    above_wire, above_gloo = report.ratios[:2]
    report.targets = [
        Target("C++ half round trip at 8 B / ucx_perftest", above_wire.median(), 2.0, at_most=True),
        Target("Python send/recv at 8 B, times faster than gloo", above_gloo.median(), 2.5, at_most=False),
    ]
    return report
