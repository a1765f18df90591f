"""Gradients whose memory is given back between steps."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from farandole import megatron
from farandole.ddp import DistributedOptimizer
from megatron_api.data_parallel_support import Network, collection_of
from pipelining.pipeline_support import BACKENDS
from support.devices import DEVICE
from support.processes import run_ranks


def _model(sharded: bool, fp32: bool) -> megatron.DistributedDataParallel:
    group = dist.group.WORLD
    config = megatron.DistributedDataParallelConfig(
        use_distributed_optimizer=sharded, overlap_grad_reduce=True, grad_reduce_in_fp32=fp32
    )
    module = Network(random.Random(3), torch.bfloat16 if fp32 else torch.float32)
    return megatron.DistributedDataParallel(
        SimpleNamespace(), config, module, pg_collection=collection_of(group, group)
    )


def _train(model: megatron.DistributedDataParallel, optimizer: DistributedOptimizer, step: int) -> None:
    model.zero_grad_buffer()
    optimizer.zero_grad()
    dtype = next(model.parameters()).dtype
    with model.no_sync():
        model(torch.full((3, 4), 0.1 * step, dtype=dtype)).backward()
    model(torch.full((3, 4), 0.1 * step + 1, dtype=dtype)).backward()
    model.finish_grad_sync()
    model.scale_gradients(torch.tensor(0.5))
    optimizer.step()


def _given_back(rank: int, world_size: int, sharded: bool, fp32: bool) -> None:
    models = [_model(sharded, fp32) for _ in range(2)]
    optimizers = [DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1), model) for model in models]
    kept, other = models
    main_grads = [parameter.main_grad for parameter in kept.parameters()]
    for step in range(4):
        loss = kept(torch.ones(3, 4, dtype=next(kept.parameters()).dtype)) if step == 2 else None
        kept.offload_grad_buffers()
        assert all(grad.untyped_storage().nbytes() == 0 for grad in main_grads)
        x = torch.ones(3, 4, dtype=next(kept.parameters()).dtype)
        refused = [
            lambda x=x: kept(x),
            kept.zero_grad_buffer,
            lambda: kept.scale_gradients(2.0),
            lambda: kept.scale_gradients(torch.tensor(2.0)),
            kept.start_grad_sync,
            kept.finish_grad_sync,
            lambda: DistributedOptimizer(torch.optim.Adam(kept.parameters()), kept),
        ]
        kept.offload_grad_buffers()  # nothing, the second time
        if loss is not None:
            refused.append(loss.backward)
        for call in refused:
            with pytest.raises(RuntimeError, match=r"given back by offload_grad_buffers\(\): call restore"):
                call()
        scaler = torch.amp.GradScaler(DEVICE)
        scaler.scale(torch.ones(1))
        for call in (
            optimizers[0].step,
            lambda: optimizers[0].clip_grad_norm_(1.0),
            lambda scaler=scaler: scaler.unscale_(optimizers[0]),
        ):
            with pytest.raises(RuntimeError, match="gradients were not reduced"):
                call()
        kept.zero_grad()  # what autograd has left of the backward that was refused
        kept.restore_grad_buffers()
        kept.restore_grad_buffers()
        assert all(parameter.main_grad is grad for parameter, grad in zip(kept.parameters(), main_grads, strict=True))
        assert all(not grad.any() for grad in main_grads)
        for model, optimizer in zip(models, optimizers, strict=True):
            _train(model, optimizer, step)
        for got, want in zip(kept.parameters(), other.parameters(), strict=True):
            assert torch.equal(got, want), f"step {step}, rank {rank}"


@pytest.mark.parametrize("fp32", [False, True])
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_have_no_memory_until_it_is_restored(backend: str, sharded: bool, fp32: bool) -> None:
    run_ranks(_given_back, 2, backend, sharded=sharded, fp32=fp32)
