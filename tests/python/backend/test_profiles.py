"""torch.profiler around operations: where their ranges begin and end, and profiles that stop before they do."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.processes import run_ranks

pytestmark = only_on_cpu("NCCL's operations are done, for the profiler, once they are on their stream")

CPU = [torch.profiler.ProfilerActivity.CPU]
LATE = 0.3  # seconds by which a sender lets its receiver wait


def _ranges(profile):
    return [event for event in profile.events() if event.name.startswith("farandole:")]


def _receives_in_flight(rank, world_size, profiles, receives):
    counts = []
    for turn in range(profiles):
        if rank == 0:
            into = [torch.zeros(3) for _ in range(receives)]
            with torch.profiler.profile(activities=CPU) as profile:
                works = [dist.irecv(tensor, 1, tag=tag) for tag, tensor in enumerate(into)]
            # What a late end writes to would be theirs by now.
            others = [torch.zeros(numel) for numel in range(1, 2000, 7)]
        dist.barrier()
        if rank == 1:
            for tag in range(receives):
                dist.send(torch.full((3,), turn + 1.0), 0, tag=tag)
        else:
            for work in works:
                work.wait()
            assert all(tensor.tolist() == [turn + 1.0] * 3 for tensor in into)
            assert not any(other.any() for other in others)
            counts.append(len(_ranges(profile)))
    return counts


# Over gloo this ends the process ("free(): invalid pointer").
def test_a_profile_may_stop_before_what_began_in_it_is_done():
    counts, _ = run_ranks(_receives_in_flight, 2, "farandole", profiles=60, receives=8)
    assert counts == [8] * 60


def _receives_of_the_profile_before(rank, world_size, profiles):
    """Each receive is waited for while the next profile runs."""
    if rank == 1:
        for turn in range(profiles):
            dist.barrier()
            dist.send(torch.full((3,), float(turn)), 0)
        return None
    counts, before = [], None
    for _ in range(profiles):
        with torch.profiler.profile(activities=CPU) as profile:
            if before is not None:
                dist.barrier()
                before.wait()
            before = dist.irecv(torch.zeros(3), 1)
        counts.append(sorted(event.name for event in _ranges(profile)))
    dist.barrier()
    before.wait()
    return counts


def test_a_wait_in_the_next_profile_is_of_no_range_there():
    counts, _ = run_ranks(_receives_of_the_profile_before, 2, "farandole", profiles=40)
    assert counts == [["farandole:recv"]] + [["farandole:barrier", "farandole:recv"]] * 39


def _ended(how, work):
    if how == "wait":
        work.wait()
    elif how == "is_completed":
        while not work.is_completed():
            time.sleep(0.001)
    elif how == "is_success":
        while not work.is_success():
            time.sleep(0.001)
    elif how == "future":
        work.get_future().wait()
    elif how == "elsewhere":
        other = threading.Thread(target=work.wait)
        other.start()
        other.join()


def _late_sender(rank, world_size, how):
    """Seconds that the range lasts, and that it ends before the one around it."""
    if rank == 1:
        dist.barrier()
        time.sleep(LATE)
        dist.send(torch.ones(3), 0)
        return None
    with torch.profiler.profile(activities=CPU) as profile, torch.profiler.record_function("around"):
        work = dist.irecv(torch.zeros(3), 1)
        dist.barrier()
        _ended(how, work)
        if how != "elsewhere":
            del work
        time.sleep(LATE)
    times = {event.name: event.time_range for event in profile.events()}
    received, around = times["farandole:recv"], times["around"]
    return received.elapsed_us() / 1e6, (around.end - received.end) / 1e6


@pytest.mark.parametrize(
    ("how", "shortest", "before"),
    [
        ("wait", 0.9 * LATE, 0.9 * LATE),
        ("is_completed", 0.9 * LATE, 0.9 * LATE),
        ("is_success", 0.9 * LATE, 0.9 * LATE),
        ("future", 0, 1.4 * LATE),  # as over NCCL: what it took to begin it
        ("elsewhere", 0, 1.4 * LATE),
    ],
)
def test_a_range_ends_where_its_thread_finds_the_operation_done(how, shortest, before):
    (lasts, earlier), _ = run_ranks(_late_sender, 2, "farandole", how=how)
    assert lasts >= shortest
    assert earlier >= before
