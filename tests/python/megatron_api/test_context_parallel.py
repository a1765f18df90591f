"""Ranks that have parts of one sequence share gradients and optimizer state as replicas do, in groups of their own."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole import megatron
from farandole.ddp import DistributedOptimizer
from megatron_api.data_parallel_support import alone_groups, collection_of
from pipelining.pipeline_support import BACKENDS
from support.devices import seeded
from support.processes import run_ranks


def _train(rank: int, world_size: int, sharded: bool) -> None:
    """Two replicas of two ranks each."""
    dp = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    collection = collection_of(dp, alone_groups(rank, world_size))
    collection.dp_cp = dist.group.WORLD
    config = megatron.DistributedDataParallelConfig(use_distributed_optimizer=sharded, overlap_grad_reduce=True)
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(4, 50), nn.Tanh(), nn.Linear(50, 8))
    alone = copy.deepcopy(module)
    with torch.no_grad():
        module[0].weight += rank  # broadcast_params() makes them alike
    of_model = SimpleNamespace(context_parallel_size=2)
    model = megatron.DistributedDataParallel(of_model, config, module, pg_collection=collection)
    model.broadcast_params()
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05), model)
    plain = torch.optim.AdamW(alone.parameters(), lr=0.05)
    for step in range(4):
        parts = [torch.randn(3, 4, generator=seeded(10 * step + r)) for r in range(world_size)]
        model.zero_grad_buffer()
        optimizer.zero_grad()
        plain.zero_grad()
        model(parts[rank]).square().mean().backward()
        model.finish_grad_sync()
        alone(torch.cat(parts)).square().mean().backward()
        optimizer.step()
        plain.step()
        for got, want in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    # Each of the four has a part of the state, where it is sharded.
    held = sum(value.numel() for state in optimizer.state.values() for key, value in state.items() if key == "exp_avg")
    whole = sum(parameter.numel() for parameter in module.parameters())
    assert (held < whole) == sharded


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_and_state_are_of_all_ranks_with_the_parameters(backend: str, sharded: bool) -> None:
    run_ranks(_train, 4, backend, sharded=sharded)
