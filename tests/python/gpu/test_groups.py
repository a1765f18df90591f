"""Groups: of CPU and CUDA, made eagerly, made of others, and split."""

import os

import pytest
import torch
import torch.distributed as dist

from farandole.bench._gpus import Placement
from support.gpus import needs_gpu, needs_two_gpus, run_on_gpus

pytestmark = [needs_gpu, pytest.mark.timeout(200)]


def _init(rank, world_size, folder, backend="farandole", **kwargs):
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, **kwargs)


def _sum(device, group=None, value=1.0):
    x = torch.full((1000,), value, device=device)
    dist.all_reduce(x, group=group)
    return x.mean().item()


def _both_devices(rank, world_size):
    totals = set()
    for round_ in range(30):
        totals |= {_sum("cuda", value=1.0), _sum("cpu", value=2.0)}
        flat = torch.empty(world_size, device="cuda" if round_ % 2 else "cpu")
        dist.all_gather_into_tensor(flat, torch.full((1,), float(rank), device=flat.device))
        assert flat.tolist() == [float(r) for r in range(world_size)]
    backends = {dist.group.WORLD._get_backend(torch.device(device)).name() for device in ("cpu", "cuda")}
    return totals, backends


def test_one_group_takes_tensors_of_both_devices_in_any_order(world):
    for totals, backends in run_on_gpus(_both_devices, world):
        assert totals == {float(world.size), 2.0 * world.size}
        assert backends == {"farandole"}


def _mixed(rank, world_size, folder):
    _init(rank, world_size, folder, "cpu:gloo,cuda:farandole")
    result = _sum("cpu"), _sum("cuda")
    dist.destroy_process_group()
    return result


def test_cuda_can_be_farandoles_where_the_cpu_is_gloos(world, tmp_path):
    results = run_on_gpus(_mixed, world, backend=None, folder=str(tmp_path), env={"GLOO_SOCKET_IFNAME": "lo"})
    assert results == [(world.size, world.size)] * world.size


def _eager(rank, world_size, folder):
    device = torch.device("cuda", torch.cuda.current_device())
    _init(rank, world_size, folder, device_id=device)
    results = [_sum(device)]
    whole = dist.new_group()
    results.append(_sum(device, whole))
    alone = [dist.new_group([r]) for r in range(world_size)][rank]
    results.append(_sum(device, alone))
    halves = [list(range(start, min(start + 2, world_size))) for start in range(0, world_size, 2)]
    part = dist.split_group(split_ranks=halves)
    results += [_sum(device, part), dist.get_world_size(part)]
    dist.barrier()
    dist.destroy_process_group()
    return results


def test_a_group_that_is_bound_to_a_device_is_made_at_once_and_can_be_split(world, tmp_path):
    results = run_on_gpus(_eager, world, backend=None, folder=str(tmp_path))
    for rank, (total, whole, alone, part, part_size) in enumerate(results):
        assert total == whole == world.size
        assert alone == 1
        assert part == part_size == min(2, world.size - rank // 2 * 2)


def _shrink(rank, world_size, connects):
    if connects:
        _sum("cuda")
        torch.cuda.synchronize()
    if rank == 0:
        dist.barrier()  # of the CPU: this rank stays until the others have their group
        return None
    smaller = dist.group.WORLD._get_backend(torch.device("cuda")).shrink([0])
    x = torch.ones(1000, device="cuda")
    smaller.allreduce([x], dist.AllreduceOptions()).wait()
    result = x.mean().item()
    smaller.shutdown()
    dist.barrier()
    return result


@pytest.mark.parametrize("connects", [False, True])
def test_a_group_that_is_shrunk_goes_on_without_the_excluded_rank(world, connects):
    results = run_on_gpus(_shrink, world, connects=connects)
    assert results == [None] + [world.size - 1.0] * (world.size - 1)


def _new_groups(rank, world_size):
    results = []
    for round_ in range(5):
        group = dist.new_group(use_local_synchronization=bool(round_ % 2), ranks=list(range(world_size)))
        results.append(_sum("cuda", group))
        torch.cuda.synchronize()
        dist.destroy_process_group(group)
    reversed_group = dist.new_group(list(reversed(range(world_size))))
    gathered = torch.empty(world_size, device="cuda")
    dist.all_gather_into_tensor(gathered, torch.full((1,), float(rank), device="cuda"), group=reversed_group)
    return results, gathered.tolist(), _sum("cuda")


def test_groups_come_and_go(world):
    for results, gathered, total in run_on_gpus(_new_groups, world):
        assert results == [world.size] * 5
        assert sorted(gathered) == [float(r) for r in range(world.size)]
        assert total == world.size


def _without_destroy(rank, world_size, folder):
    _init(rank, world_size, folder)
    return _sum("cuda")


def test_a_process_that_never_destroys_its_group_ends(world, tmp_path):
    assert run_on_gpus(_without_destroy, world, backend=None, folder=str(tmp_path)) == [world.size] * world.size


def _twice(rank, world_size, folder):
    results = []
    for name in ("first", "second"):
        _init(rank, world_size, os.path.join(folder, name))
        results.append(_sum("cuda"))
        dist.destroy_process_group()
    return results


def test_after_destroy_another_group_can_be_made(world, tmp_path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    assert run_on_gpus(_twice, world, backend=None, folder=str(tmp_path)) == [[world.size] * 2] * world.size


def _several_devices(rank, world_size):
    return [_sum(torch.device("cuda", index)) for index in range(2)]


@needs_two_gpus
def test_one_rank_may_use_several_devices():
    assert run_on_gpus(_several_devices, Placement(1)) == [[1.0, 1.0]]
