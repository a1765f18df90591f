"""Random operations, drawn alike by all ranks, over farandole and over gloo.

A round is one operation, or several in groups that overlap, which are open at the same time: each rank starts those of
a group in one order, and waits for all in an order of its own. Every result is compared with what torch or numpy
compute from all ranks' data; those that all ranks get must be the same bits. What gloo can do it does, too, and is
compared alike.
"""

from __future__ import annotations

import os
import random
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from support.drawn.blocking import BLOCKING
from support.drawn.combinations import COMBINATIONS, REDUCES_TO_ALL
from support.drawn.messages import MESSAGES
from support.drawn.movements import GIVES_ALL_THE_SAME, MOVEMENTS
from support.drawn.on_gloo import as_bytes, gloo_can
from support.drawn.operation import Operation, Run

START = {**MOVEMENTS, **COMBINATIONS, **MESSAGES}
KINDS = sorted({**START, **BLOCKING})


@dataclass
class _Groups:
    ranks: list[int]
    ours: Any
    gloo: Any
    hosts: int


def _shapes(world_size: int) -> list[list[int]]:
    """All, all again, all but the first, one, and pairs that overlap and that do not."""
    everybody = list(range(world_size))
    shapes = [everybody, everybody, everybody[1:], [world_size - 1]]
    if world_size > 2:
        shapes += [[0, 1], [0, 2], [1, 2]]
    if world_size > 3:
        shapes += [[2, 3], [0, 1, 3]]
    return shapes


def _make_groups(world_size: int) -> list[_Groups]:
    hosts: list[Any] = [None] * world_size
    dist.all_gather_object(hosts, (os.environ.get("FARANDOLE_HOST_ID", ""), os.uname().nodename, _network()))
    groups = []
    for ranks in _shapes(world_size):
        ours, gloo = (dist.new_group(ranks, backend=name) for name in ("farandole", "gloo"))
        groups.append(_Groups(ranks, ours, gloo, len({hosts[r] for r in ranks})))
    return groups


def _network() -> str:
    return os.readlink("/proc/self/ns/net")


def _start(op: Operation, run: Run) -> None:
    (START.get(op.kind) or BLOCKING[op.kind])(op, run)


class _Round:
    def __init__(self, seed: int, groups: list[_Groups]) -> None:
        rng = random.Random(seed)
        self.seed = seed
        self.at_once = rng.random() < 0.5
        self.operations = []
        # What is waited for at once would have ranks that open several wait for each other.
        kinds = sorted(START if self.at_once or rng.random() < 0.7 else BLOCKING)
        for index in range(rng.randrange(2, 6) if self.at_once else 1):
            group = rng.choice(groups)
            self.operations.append((Operation(seed * 8 + index, kinds, group.ranks, group.hosts), group))
        self.is_async = self.at_once or rng.random() < 0.5
        self.on_gloo = rng.random() < 0.5

    def run(self, rank: int) -> list[int]:
        """The digest of what each operation gave this rank, 0 where it is not to be the same everywhere."""
        rng = random.Random(f"{self.seed} {rank}")
        mine = [(op, group, op.ranks.index(rank)) for op, group in self.operations if rank in op.ranks]
        runs: list[Run] = []
        try:
            for op, group, me in _interleaved(mine, rng):
                runs.append(Run(op, group.ours, me, self.is_async))
                _start(op, runs[-1])
            for run in rng.sample(runs, len(runs)):
                run.wait(rng)
            for run in runs:
                _check(run)
            for op, group, me in mine:
                if self.on_gloo and gloo_can(op, group.gloo):
                    theirs = Run(op, group.gloo, me, self.is_async, is_plain=True, as_bytes=as_bytes(op))
                    _start(op, theirs)
                    theirs.wait(rng)
                    _check(theirs)
        except Exception as error:
            raise AssertionError(f"{self}: {error}") from error
        digests = {run.operation.seed: run.digest() for run in runs}
        same = GIVES_ALL_THE_SAME + REDUCES_TO_ALL
        return [digests.get(op.seed, 0) if op.kind in same else 0 for op, _ in self.operations]

    def compare(self, digests: list[list[int]]) -> None:
        """``digests``: of each rank."""
        for index, (op, _) in enumerate(self.operations):
            assert len({digests[r][index] for r in op.ranks}) == 1, f"{self}: the ranks have different bits of {op}"

    def __str__(self) -> str:
        how = "at once" if self.at_once else "async" if self.is_async else "sync"
        return f"round {self.seed}, {how}: " + "; ".join(str(op) for op, _ in self.operations)


def _interleaved(mine: list[Any], rng: random.Random) -> list[Any]:
    """In a random order, but for those of a group, whose order all its ranks share."""
    queues: dict[int, list[Any]] = {}
    for one in mine:
        queues.setdefault(id(one[1]), []).append(one)
    order = [key for key, queue in queues.items() for _ in queue]
    rng.shuffle(order)
    return [queues[key].pop(0) for key in order]


def _check(run: Run) -> None:
    try:
        run.check()
    except AssertionError as error:
        where = "over gloo" if run.is_plain else "over farandole"
        raise AssertionError(f"{run.operation} {where}: {error}") from None


def is_over(end: float) -> bool:
    """Whether that time has come for any rank: all stop at the same round."""
    stop = torch.tensor([time.monotonic() > end], dtype=torch.int32)
    dist.all_reduce(stop, dist.ReduceOp.MAX)
    return bool(stop.item())


def run_rounds(rank: int, world_size: int, first_seed: int, seconds: float) -> tuple[int, list[str]]:
    """Rounds from ``first_seed`` on for ``seconds``, which may be infinite; how many, and the kinds that were drawn."""
    groups = _make_groups(world_size)
    kinds: set[str] = set()
    seed, end = first_seed, time.monotonic() + seconds
    told = time.monotonic() + 60
    while True:
        if (seed - first_seed) % 20 == 0:
            if is_over(end):
                return seed - first_seed, sorted(kinds)
            if rank == 0 and time.monotonic() > told:
                print(f"{seed - first_seed} rounds", flush=True)
                told += 60
        drawn = _Round(seed, groups)
        digests: list[Any] = [torch.zeros(len(drawn.operations), dtype=torch.int64) for _ in range(world_size)]
        dist.all_gather(digests, torch.tensor(drawn.run(rank)), group=groups[0].gloo)
        drawn.compare([one.tolist() for one in digests])
        kinds.update(op.kind for op, _ in drawn.operations)
        seed += 1
