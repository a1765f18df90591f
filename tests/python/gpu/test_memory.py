"""NCCL's memory: pools that are registered with a group, and what NCCL tells of its own."""

import pytest
import torch
import torch.distributed as dist

from support.gpus import needs_gpu, run_on_gpus

pytestmark = [needs_gpu, pytest.mark.timeout(200)]


def _backend():
    return dist.group.WORLD._get_backend(torch.device("cuda"))


def _sum_of(x):
    dist.all_reduce(x)
    return set(x.tolist())


def _registered(rank, world_size):
    pool = torch.cuda.MemPool(_backend().mem_allocator)
    with pytest.raises(ValueError, match="is not registered"):
        _backend().deregister_mem_pool(pool)
    with torch.cuda.use_mem_pool(pool):
        first = torch.ones(1 << 20, device="cuda")
    with pytest.raises(ValueError, match="is not connected"):
        _backend().register_mem_pool(pool)
    _sum_of(torch.ones(1, device="cuda"))
    _backend().register_mem_pool(pool)
    totals = [_sum_of(first)]
    with torch.cuda.use_mem_pool(pool):
        more = torch.ones(40 << 20, device="cuda")
    _backend().register_mem_pool(pool)
    totals.append(_sum_of(more))
    torch.cuda.synchronize()
    _backend().deregister_mem_pool(pool)
    totals.append(_sum_of(torch.ones(100, device="cuda")))
    _backend().register_mem_pool(pool)  # and left so to the end
    return totals


def test_a_pool_of_nccls_memory_can_be_registered_again_and_again(world):
    assert run_on_gpus(_registered, world) == [[{float(world.size)}] * 3] * world.size


def _stats(rank, world_size):
    before = _backend().memory_stats()
    _sum_of(torch.ones(1 << 20, device="cuda"))
    torch.cuda.synchronize()
    return before, _backend().memory_stats()


def test_nccl_tells_what_it_has_allocated(world):
    if torch.cuda.nccl.version() < (2, 30):
        pytest.skip("NCCL tells from 2.30 on")
    for before, after in run_on_gpus(_stats, world):
        assert before["total"] == 0
        assert after["total"] == after["persist"] + after["suspend"]
        assert after["suspended"] == 0
