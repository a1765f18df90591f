"""Parameters that are broadcast while an optimizer step's gathers of them are under way."""

from __future__ import annotations

import copy
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole import megatron
from farandole.ddp import DistributedOptimizer
from megatron_api.data_parallel_support import collection_of
from pipelining.pipeline_support import BACKENDS
from support.processes import run_ranks


def _broadcast_meanwhile(rank: int, world_size: int) -> None:
    """Gathers are of an optimizer instance, broadcasts of all ranks: what is of two groups has no order."""
    intra = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    inter = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])[0]
    collection = collection_of(dist.group.WORLD, dist.group.WORLD)
    collection.intra_dp_cp, collection.intra_expt_dp, collection.inter_dist_opt = intra, intra, inter
    config = megatron.DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        num_distributed_optimizer_instances=2,
    )
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(4, 50), nn.Tanh(), nn.Linear(50, 8))  # each rank has a part of it
    alone = copy.deepcopy(module)
    model = megatron.DistributedDataParallel(SimpleNamespace(), config, module, pg_collection=collection)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    x = torch.ones(3, 4)
    for _ in range(3):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        plain.zero_grad()
        model(x).sum().backward()
        model.finish_grad_sync()
        alone(x).sum().backward()
        time.sleep(0.2 * (rank % 2))  # others bring their parts later than rank 0 could send what it has
        optimizer.step()
        model.broadcast_params()
        plain.step()
        for got, want in zip(module.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_broadcast_gives_what_the_step_has_made(backend: str) -> None:
    run_ranks(_broadcast_meanwhile, 4, backend)
