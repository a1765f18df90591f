"""What who waits for a rank hears when that leaves in order: with its process, or this group alone."""

import time

import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.hosts import PretendHost
from support.processes import await_all, run_ranks

pytestmark = only_on_cpu("the CPU side knows who has left for both")

STAYING = 1


def _all_leave(rank, world_size):
    dist.barrier()
    if rank != STAYING:
        dist.send(torch.full((3,), float(rank)), STAYING)
        return None
    received = torch.zeros(3)
    seen = []
    for _ in range(world_size - 1):
        dist.recv(received)
        seen.append(int(received[0]))
    assert sorted(seen) == [other for other in range(world_size) if other != rank]
    seconds = []
    for _ in range(2):  # the second one begins when all are known to be gone
        start = time.monotonic()
        with pytest.raises(
            dist.DistBackendError, match=r"(all others are|rank \d .* is) gone.* (has left|connection broke)"
        ):
            dist.recv(received)
        seconds.append(time.monotonic() - start)
    return max(seconds)


@pytest.mark.parametrize("env", [{}, {"FARANDOLE_TRANSPORT": "ucx"}], ids=["shm", "ucx"])
def test_a_receive_from_any_rank_ends_when_all_others_have_left(env):
    outcomes = run_ranks(_all_leave, 3, "farandole", env=env)
    assert outcomes[STAYING] < 10, outcomes


def _leave_a_sub_group(rank, world_size):
    """Rank 0 leaves it and goes on; rank 1 waits there, for what comes and for what does not."""
    group = dist.new_group([0, 1])
    received = torch.zeros(2, 3)
    early = dist.irecv(received[0], 0, group=group, tag=7) if rank == STAYING else None
    dist.barrier()
    if rank == 0:
        for tag in (7, 8):
            dist.send(torch.full((3,), float(tag)), STAYING, group=group, tag=tag)
        dist.destroy_process_group(group)
    seconds = []
    if rank == STAYING:

        def hears_of_it(call):
            start = time.monotonic()
            with pytest.raises(dist.DistBackendError, match=r"rank 0 .* has left"):
                call()
            seconds.append(time.monotonic() - start)

        early.wait()
        hears_of_it(lambda: dist.recv(torch.zeros(3), 0, group=group, tag=9))
        dist.recv(received[1], 0, group=group, tag=8)  # it came before rank 0 left
        assert torch.equal(received, torch.tensor([[7.0] * 3, [8.0] * 3]))
        hears_of_it(lambda: dist.recv(torch.zeros(3), group=group, tag=9))
        hears_of_it(lambda: dist.all_reduce(torch.ones(3), group=group))
    await_all(rank, world_size)
    ones = torch.ones(3)
    dist.all_reduce(ones)
    assert torch.equal(ones, torch.full((3,), float(world_size)))
    return seconds


@pytest.mark.parametrize("host_of_rank", [(0, 0, 0), (0, 1, 0)], ids=str)
def test_who_waits_for_a_rank_that_has_left_only_this_group_hears_of_it_and_loses_nothing(host_of_rank):
    seconds = run_ranks(_leave_a_sub_group, 3, "farandole", enter=PretendHost(host_of_rank))[STAYING]
    assert max(seconds) < 12, seconds
