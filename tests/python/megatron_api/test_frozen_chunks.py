"""Chunks of a model that have nothing to train are wrapped like the others, and reduce nothing."""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole import ddp, megatron
from megatron_api import data_parallel_support as support
from megatron_api.megatron_support import world
from support.processes import await_all, run_ranks


def _wrap(module: nn.Module, **options: Any) -> megatron.DistributedDataParallel:
    ddp_config = megatron.DistributedDataParallelConfig(**options)
    collection = support.collection_of(world(), None)
    return megatron.DistributedDataParallel(
        megatron.ModelParallelConfig(), ddp_config, module, pg_collection=collection
    )


def _finalize(models: list[Any]) -> None:
    groups = SimpleNamespace(tp=None, pp=None, embd=None, pos_embd=None, dp_cp=world())
    megatron.finalize_model_grads(models, pg_collection=groups)


def _train(rank: int, world_size: int) -> None:
    for sharded, overlaps, first in itertools.product((False, True), (False, True), ("frozen", "empty")):
        torch.manual_seed(1)
        frozen = nn.Linear(4, 4).requires_grad_(False) if first == "frozen" else nn.Tanh()
        chunks = [frozen, nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(False)]
        alone = copy.deepcopy(nn.Sequential(*chunks))
        options = {"overlap_grad_reduce": overlaps, "use_distributed_optimizer": sharded}
        models = [_wrap(chunk, overlap_param_gather=sharded and overlaps, **options) for chunk in chunks]
        optimizer = ddp.DistributedOptimizer(torch.optim.Adam(models[1].parameters(), lr=0.1), models)
        reference = torch.optim.Adam(alone[1].parameters(), lr=0.1)
        data = torch.randn(3, world_size, 2, 4)
        for step in range(3):
            for model in models:
                model.zero_grad_buffer()
            optimizer.zero_grad()
            y = data[step, rank]
            for model in models:
                y = model(y)
            y.square().sum().backward()
            _finalize(models)
            norm, zeros = optimizer.clip_grad_norm_(1.0), optimizer.count_zeros()
            optimizer.step()
            reference.zero_grad()
            (alone(data[step].flatten(0, 1)).square().sum() / world_size).backward()
            want = torch.nn.utils.clip_grad_norm_(alone[1].parameters(), 1.0)
            reference.step()
            assert norm.item() == pytest.approx(want.item(), rel=1e-4) and zeros == 0
        for model, layer in zip(models, alone, strict=True):
            if sharded:
                model.start_param_sync(force_sync=True)
            for mine, other in zip(model.module.parameters(), layer.parameters(), strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
        assert optimizer.full_state_dict()["state"].keys() == {"1.weight", "1.bias"}
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", ["gloo", "farandole"])
def test_chunks_with_nothing_to_train_are_passed_through(backend):
    run_ranks(_train, 2, backend, timeout=60)


def _a_rank_without(rank: int, world_size: int) -> None:
    """Of a pipeline's two stages the first is frozen: its optimizer has no parameter, and counts nothing."""
    group = [dist.new_group([other]) for other in range(world_size)][rank]
    collection = support.collection_of(group, None)
    module = nn.Linear(3, 2)
    module.requires_grad_(rank == 1)
    for sharded in (False, True):
        model = megatron.DistributedDataParallel(
            megatron.ModelParallelConfig(),
            megatron.DistributedDataParallelConfig(use_distributed_optimizer=sharded),
            module,
            pg_collection=collection,
        )
        trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        optimizer = ddp.DistributedOptimizer(
            torch.optim.Adam([{"params": trainable}]), model, model_parallel_group=world()
        )
        model.zero_grad_buffer()
        optimizer.zero_grad()
        output = model(torch.tensor([[1.0, 0.0, 2.0]])).sum()
        if rank == 1:
            output.backward()
        model.finish_grad_sync()
        assert optimizer.clip_grad_norm_(100.0).item() == pytest.approx((2 * (1 + 4) + 2) ** 0.5)
        assert optimizer.count_zeros() == 2
        optimizer.step()
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", ["gloo", "farandole"])
def test_a_rank_may_have_nothing_to_train(backend):
    run_ranks(_a_rank_without, 2, backend, timeout=60)


def _unlike(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match=r"weight"):
        _wrap(nn.Linear(3, 2).requires_grad_(rank == 0))
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        ddp.DistributedDataParallel(nn.Linear(3, 2).requires_grad_(False))
    await_all(rank, world_size)


def test_a_chunk_that_is_frozen_on_one_replica_is_an_error_on_all():
    run_ranks(_unlike, 2, "gloo")
