"""Everything at once: uneven data, windows, batches that are carried over, failures; as the plain loop does it."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from farandole.sparse import TrainPipelineSparseDist
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import Loader, Recommender, Trouble, assert_same, is_same, make_batches, on_device, wrapped


class Failing(Recommender):
    """Fails in the forwards of the batches that are named."""

    fails: set[int]

    def __init__(self, seed: int, tables: int) -> None:
        super().__init__(seed, tables)
        self.fails = set()
        self.dense.register_forward_pre_hook(self.fail)
        self.forwards = 0

    def fail(self, *_: Any) -> None:
        self.forwards += 1
        if self.forwards - 1 in self.fails:
            raise Trouble("forward")


class Plain:
    """The loop without a pipeline, of batches that are there on all ranks, with a window that outlives failures of
    forwards."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, grad_accum: int) -> None:
        self.model, self.optimizer, self.size = model, optimizer, grad_accum
        self.filled = 0

    def train(self, batch: Any) -> torch.Tensor:
        if self.filled == 0:
            self.optimizer.zero_grad()
        self.model.require_backward_grad_sync = self.filled == self.size - 1
        losses, output = self.model(on_device(batch))
        torch.sum(losses / self.size, dim=0).backward()
        self.filled += 1
        if self.filled == self.size:
            self.optimizer.step()
            self.filled = 0
        return output

    def close(self) -> None:
        """A window that the end cuts short: torch would have averaged it in its last backward."""
        if self.filled == 0:
            return
        for part in self.model.module.dense.parameters():
            part.grad *= 1.0 / torch.distributed.get_world_size()  # as torch's DDP does it
            torch.distributed.all_reduce(part.grad)
        self.optimizer.step()
        self.filled = 0


def run_case(pick: random.Random, rank: int, world_size: int) -> None:
    """``pick`` draws the same on all ranks."""
    seed, tables, grad_accum = pick.randrange(1 << 20), pick.randint(1, 2), pick.choice([1, 2, 3])
    executes_all, threads = pick.random() < 0.5, pick.choice([False, True, None])
    print(f"  grad_accum {grad_accum}, execute_all_batches {executes_all}, threads {threads}")
    models = [wrapped(Failing(seed, tables)) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    pipeline = TrainPipelineSparseDist(
        models[0],
        optimizers[0],
        DEVICE,
        executes_all,
        grad_accum=grad_accum,
        load_on_thread=threads,
        dist_on_thread=threads,
        strict=True,
    )
    plain = Plain(models[1], optimizers[1], grad_accum)
    carried: list[list[tuple[Any, bool]]] = [[] for _ in range(world_size)]  # by rank: batch, whether its load fails
    for epoch in range(3):
        numbers = [pick.randint(0, 7) for _ in range(world_size)]
        fails = [{index for index in range(number) if pick.random() < 0.12} for number in numbers]
        bad_forwards = {index for index in range(8) if pick.random() < 0.12}
        print(f"  epoch {epoch}: {numbers} batches, loads fail {fails}, forwards fail {bad_forwards}")
        mine = make_batches(seed + epoch, numbers[rank])
        for each in range(world_size):
            more = mine if each == rank else [None] * numbers[each]
            carried[each] += [(batch, index in fails[each]) for index, batch in enumerate(more)]
        models[0].module.forwards, models[0].module.fails = 0, bad_forwards
        loader, expected = Loader(mine, fails[rank]), []
        fewest = min(map(len, carried)) - (0 if executes_all else 2)
        forwards = 0
        for index in range(max(0, fewest)):
            ranks = [each for each in range(world_size) if carried[each][index][1]]
            if ranks:
                expected.append(Trouble if rank in ranks else RuntimeError)
                continue
            forwards += 1
            expected.append(Trouble if forwards - 1 in bad_forwards else plain.train(carried[rank][index][0]))
        if executes_all and len(carried[rank]) > fewest and carried[rank][fewest][1]:
            expected.append(Trouble)  # of a batch that others do not have, too
        for each in range(world_size):
            left = carried[each][max(0, fewest) :]
            carried[each] = [] if executes_all else left[:3]  # the rest is not taken from the loader
        if executes_all:
            plain.close()
        compare(pipeline, loader, expected)
        assert_same(*models)
    pipeline.detach()


def compare(pipeline: Any, loader: Any, expected: list[Any]) -> None:
    for index, result in enumerate(expected):
        if isinstance(result, torch.Tensor):
            assert is_same(pipeline.progress(loader), result), index
        else:
            with pytest.raises(result):
                pipeline.progress(loader)
    with pytest.raises(StopIteration):
        pipeline.progress(loader)


def run_cases(rank: int, world_size: int, seed: int, cases: int) -> None:
    pick = random.Random(seed)
    for case in range(cases):
        print(f"seed {seed}, case {case}:")
        run_case(pick, rank, world_size)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_trains_as_the_plain_loop_whatever_comes_together(world_size):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_ranks(run_cases, world_size, "farandole", timeout=120, seed=seed, cases=5)
