"""The NCCL half: its table of functions is taken from the copy that torch has loaded."""

import types

import pytest
import torch
import torch.distributed as dist

from farandole import _C
from support.processes import run_ranks

needs_nccl = pytest.mark.skipif(
    torch.version.cuda is None or not dist.is_nccl_available(), reason="torch was built without CUDA or NCCL"
)


@needs_nccl
def test_the_table_is_filled_from_torchs_own_nccl():
    assert _C.nccl_status() == ".".join(map(str, torch.cuda.nccl.version()))


def _memory(rank, world_size):
    # What needs no device.
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert isinstance(backend.mem_allocator, torch._C._cuda_CUDAAllocator)  # what torch.cuda.MemPool takes
    if torch.cuda.nccl.version() >= (2, 30):
        assert backend.memory_stats() == {"total": 0, "persist": 0, "suspend": 0, "suspended": 0}
    else:
        with pytest.raises(dist.DistBackendError, match="has no function ncclCommMemStats, which newer ones have"):
            backend.memory_stats()
    with pytest.raises(ValueError, match=r"deregister_mem_pool: pool \(0, 9\) is not registered"):
        backend.deregister_mem_pool(types.SimpleNamespace(id=(0, 9)))
    return True


@needs_nccl
def test_nccls_memory_has_torchs_names():
    assert all(run_ranks(_memory, 2, "farandole"))
