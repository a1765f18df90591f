"""What is under way when a group is destroyed: collectives come to their end, as over gloo, where the others come to them."""

import time

import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.hosts import PretendHost
from support.processes import await_all, run_ranks

pytestmark = only_on_cpu("on GPUs a group waits for its streams")

SIZES = (4, 3_000_000)
HOSTS = [(0, 0), (0, 1), (0, 0, 1, 1)]


def _results(rank, world_size, is_sub):
    """One rank after the other destroys the group at once; the last ones come later."""
    group = dist.new_group(list(range(world_size))) if is_sub else dist.group.WORLD
    tensors = [torch.full((size,), rank + 1.0) for size in SIZES]
    gathered = [torch.empty(1000) for _ in range(world_size)]
    dist.barrier()
    time.sleep(0.5 * (rank % 2))
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors]
    works.append(dist.all_gather(gathered, torch.full((1000,), float(rank)), group=group, async_op=True))
    if rank == 0:
        works.clear()
    dist.destroy_process_group(group)
    for work in works:
        work.wait()
    total = sum(range(1, world_size + 1))
    return all(torch.equal(tensor, torch.full_like(tensor, total)) for tensor in tensors) and all(
        one.unique().tolist() == [each] for each, one in enumerate(gathered)
    )


@pytest.mark.parametrize("is_sub", [False, True], ids=["world", "group"])
@pytest.mark.parametrize("hosts", HOSTS, ids=str)
def test_collectives_that_are_under_way_are_finished(hosts, is_sub):
    assert all(run_ranks(_results, len(hosts), "farandole", timeout=60, enter=PretendHost(hosts), is_sub=is_sub))


def _alone(rank, world_size):
    """What nobody comes for: a receive, which is not waited for, and then a collective, for which there is some patience."""
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    dist.barrier()
    seconds = []
    for group in groups if rank == 0 else ():
        tensor = torch.ones(4)
        is_message = not seconds
        work = dist.irecv(tensor, 1, group) if is_message else dist.all_reduce(tensor, group=group, async_op=True)
        start = time.monotonic()
        dist.destroy_process_group(group)
        seconds.append(time.monotonic() - start)
        with pytest.raises(dist.DistBackendError, match="the process group was shut down"):
            work.wait()
    await_all(rank, world_size)
    return seconds


def test_what_nobody_comes_for_ends_with_the_group():
    message, collective = run_ranks(_alone, 2, "farandole", timeout=60)[0]
    assert message < 5 < collective < 20
