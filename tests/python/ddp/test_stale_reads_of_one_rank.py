"""A parameter that one rank alone has read too early is an error on all ranks, at once, after which they go on."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS
from told_layers import ALL, Layers, batch_of, trained

from farandole import ddp, megatron
from megatron_api.data_parallel_support import collection_of
from support.processes import await_all, run_ranks

SOON = 20  # seconds; the group's timeout is a minute
_READ = r"rank 1 of the group: parameter 'layers\.2\.(weight|bias)' (was|may have been) read before other ranks'"


def _one_reads(rank: int, world_size: int) -> None:
    for how in ("read", "hide"):  # as the graph shows, and as it does not
        for later in ([], ["call 2", "call 3"]):
            for accumulates in (False, True):
                if how == "hide" and later:
                    continue  # which needs overlap_param_gather=False
                pair = trained(rank, world_size)
                begin = time.monotonic()
                pair.optimizer.zero_grad()
                with pytest.raises(RuntimeError, match=_READ) as raised:
                    forward = ["call 0", "call 1", f"{how} 2", *later] if rank == 1 else ALL
                    if accumulates:
                        with pair.model.no_sync():
                            pair.model(batch_of(5, rank), forward).square().mean().backward()
                        forward = ALL
                    pair.model(batch_of(6, rank), forward).square().mean().backward()
                assert "rank 0" not in str(raised.value)
                assert time.monotonic() - begin < SOON
                for _ in range(3):
                    pair.step((ALL,))
    await_all(rank, world_size)


@pytest.mark.filterwarnings("ignore:the forward of")
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_one_rank_has_read_too_early_all_are_told(backend):
    run_ranks(_one_reads, 2, backend, timeout=60)


def _in_a_step(rank: int, world_size: int) -> None:
    """As all ranks are told, the group need not be given up."""
    pair = trained(rank, world_size)
    pair.optimizer.zero_grad()
    with pytest.raises(RuntimeError, match=_READ), pair.model.abandon_on_error():
        pair.model(batch_of(6, rank), ["call 0", "read 2"] if rank == 1 else ALL).square().mean().backward()
    pair.step((ALL,))
    await_all(rank, world_size)


def test_it_is_no_reason_to_abandon_the_group():
    run_ranks(_in_a_step, 2, BACKENDS[-1], timeout=60)


def _as_megatron(rank: int, world_size: int) -> None:
    options = megatron.DistributedDataParallelConfig(
        overlap_grad_reduce=True, use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=1
    )
    groups = collection_of(dist.group.WORLD, None)
    module: Any = Layers()
    model = megatron.DistributedDataParallel(SimpleNamespace(), options, module, pg_collection=groups)
    optimizer = ddp.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)

    def step(todo: list[str]) -> None:
        model.zero_grad_buffer()
        model(batch_of(5, rank), todo).square().mean().backward()
        model.finish_grad_sync()
        optimizer.step()

    step(ALL)
    step(ALL)
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match=_READ):
        step(["call 0", "call 1", "read 2", "call 2", "call 3"] if rank == 1 else ALL)
    assert time.monotonic() - begin < SOON
    step(ALL)
    await_all(rank, world_size)


def test_rounds_that_a_call_ends_tell_it_too():
    run_ranks(_as_megatron, 2, BACKENDS[-1], timeout=60)
