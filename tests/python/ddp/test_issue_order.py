"""Buckets are issued in one order on all ranks, which follows control flow: for a while, for good, on some ranks."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS, Block, fewer, grads
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from farandole.ddp import DistributedDataParallel, TimelineEvent
from support.devices import backend_for, seeded
from support.processes import await_all, run_ranks

_WIDTH = 8


class _Branching(torch.nn.Module):
    """Runs the blocks that it is told, one after another."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.blocks = torch.nn.ModuleList(Block(rng, _WIDTH, torch.float32) for _ in range(rng.randint(2, 7)))

    def forward(self, x: torch.Tensor, flow: list[int]) -> torch.Tensor:
        for index in flow:
            x = self.blocks[index](x)
        return x.square().mean()


def _compare(rank: int, world_size: int, seeds: list[int]) -> None:
    gloo = dist.new_group(backend=backend_for("gloo"))
    for seed in seeds:
        rng = random.Random(seed)
        policy = rng.choice(["skip", "zero_fill"])
        theirs = TorchDdp(_Branching(seed), process_group=gloo, find_unused_parameters=True)
        ours = DistributedDataParallel(_Branching(seed), bucket_size=rng.choice([1, 300]), unused_parameters=policy)
        blocks = range(len(ours.module.blocks))
        flows = [[*blocks]] * world_size
        for step in range(fewer(45)):
            if rng.random() < 0.2:  # some ranks depart, or all do
                order = rng.sample(blocks, rng.randint(1, len(blocks)))
                flows = [order if rng.random() < 0.5 else flow for flow in flows]
            x = torch.randn(3, _WIDTH, generator=seeded(1000 * step + rank))
            for model in (theirs, ours):
                model.zero_grad()
                model(x, flows[rank]).backward()
            actual = grads(ours)
            for name, expected in grads(theirs).items():
                got = actual[name]
                where = f"seed {seed}, step {step}, {name}, {policy}, {flows}"
                if expected is None:
                    assert got is None if policy == "skip" else not got.any(), where
                else:
                    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7, msg=where)
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world", [2, 3])
def test_control_flow_that_changes_gives_torchs_gradients(backend, world):
    first = random.randrange(2**30)
    seeds = [first + i for i in range(fewer(4))]
    print(f"seeds {seeds}")
    run_ranks(_compare, world, backend, timeout=120, seeds=seeds)


class _Layers(torch.nn.Module):
    """Four layers, then one of two, of which a gradient comes first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        for layer in [*self.layers[:4], self.layers[branch]]:
            x = layer(x)
        return x.square().mean()


_ROUNDS = 40


def _overlap(rank: int, world_size: int, departing: list[int]) -> list[int]:
    """How many of the reductions of each round this rank began before its last gradient."""
    model = DistributedDataParallel(_Layers(), bucket_size=1, unused_parameters="zero_fill")
    x = torch.randn(3, _WIDTH, generator=seeded(rank))
    with model.record_timeline() as timeline:
        for step in range(_ROUNDS):
            model(x, 5 if step < 4 or rank not in departing else 4).backward()
    rounds = [[event for event in timeline.events() if event.round == step] for step in range(_ROUNDS)]
    return list(map(_overlapped, rounds))


def _overlapped(events: list[TimelineEvent]) -> int:
    came = max(event.start for event in events if event.kind == "ready")
    return sum(event.kind == "reduction" and event.start < came for event in events)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("departing", [[0, 1], [0], [1]])
def test_overlap_is_there_again_after_control_flow_has_departed(backend, departing):
    results: list[Any] = run_ranks(_overlap, 2, backend, departing=departing)
    for rank, overlapped in enumerate(results):
        assert overlapped[3] == 4
        if rank in departing:
            assert overlapped[4] == 0, "all wait for the bucket that comes no more"
        assert min(overlapped[5:]) >= 3, "what all ranks use does not wait for what some do not"
        if len(departing) == 2:
            assert overlapped[-1] == 4
