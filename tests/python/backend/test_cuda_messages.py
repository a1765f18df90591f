"""FARANDOLE_CUDA_MESSAGES where no CUDA tensor is sent: the setting's errors, and that tensors on the CPU mind nothing."""

import os

import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.processes import RankFailed, run_ranks

pytestmark = [pytest.mark.timeout(120), only_on_cpu("its tensors are on the CPU")]


def _on_the_cpu(rank, world_size):
    total = torch.full((1000,), float(rank))
    dist.all_reduce(total)
    assert total.unique().tolist() == [float(sum(range(world_size)))]
    got = torch.zeros(50_000)
    receiving = dist.irecv(got, (rank - 1) % world_size, tag=3)
    dist.isend(torch.full((50_000,), float(rank)), (rank + 1) % world_size, tag=3).wait()
    receiving.wait()
    half = dist.new_group([0, 1])
    if rank < 2:
        dist.barrier(half)
    return got.mean().item()


@pytest.mark.parametrize("transport", ["auto", "shm", "ucx"])
def test_tensors_on_the_cpu_go_on_whatever_carries_those_on_cuda(transport):
    env = {"FARANDOLE_CUDA_MESSAGES": "ucx", "FARANDOLE_TRANSPORT": transport}
    assert run_ranks(_on_the_cpu, 3, "farandole", env=env) == [2.0, 0.0, 1.0]


def test_a_value_that_means_nothing_is_refused_by_name():
    with pytest.raises(RankFailed, match=r"FARANDOLE_CUDA_MESSAGES is 'tcp'; expected.*nccl.*ucx"):
        run_ranks(_on_the_cpu, 1, "farandole", env={"FARANDOLE_CUDA_MESSAGES": "tcp"})


def _differently(rank, world_size, store):
    os.environ["FARANDOLE_CUDA_MESSAGES"] = ["nccl", "ucx"][rank]
    with pytest.raises(ValueError, match=r"FARANDOLE_CUDA_MESSAGES is .*; expected the same on all ranks") as error:
        dist.init_process_group("farandole", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    return str(error.value)


def test_ranks_that_set_it_differently_are_told(tmp_path):
    for error in run_ranks(_differently, 2, None, store=str(tmp_path / "store")):
        assert "'nccl' on rank 0" in error and "'ucx' on rank 1" in error, error
