"""A process that joins and leaves groups again and again holds no more of the system than it did before."""

import os
import signal
import time
import weakref
from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.hosts import Hosts
from support.processes import await_all, run_ranks
from support.resources import private_bytes, resident_bytes, resources
from support.sanitizers import SANITIZED

pytestmark = only_on_cpu("what it counts is the CPU side's")

NOTHING = Counter()
TRANSPORTS = {"shm": {}, "ucx": {"FARANDOLE_TRANSPORT": "ucx"}}
# Nothing of descriptors, threads and maps stays, not even of the first life. But after a failure
# threads that have called hooks and dumped the flight recorder wait 10 s for more to do: two, or for so long one more
# where a machine is busy.
AFTER_FAILURE = Counter({"thread farandole-call": 2})
SETTLE = 15
# Of memory, what the process loads and touches once: libraries (UCX's 2 MiB, torch's own code), allocators' arenas.
ONCE_BYTES = 32 << 20
# Of the allocators' fragmentation and of torch's stores, for each life: measured 1 to 30 KiB, falling.
LIFE_BYTES = 64 << 10
# Of a group in a life that goes on, of private memory: what the control plane keeps of the last 256 that were left, 3
# KiB, and torch of their names, up to 3 KiB with a FileStore, which keeps what it has read. UCX's shared segments are
# no part of it: 4 MiB for each peer, whose pages are touched one after the other by the first messages.
GROUP_BYTES = 16 << 10


def _init(folder, life, rank, world_size):
    store = dist.FileStore(os.path.join(folder, f"store{life}"), world_size)
    dist.init_process_group("farandole", store=store, rank=rank, world_size=world_size)


def _use(rank, world_size, group=None):
    """Rings, the group's segment, a message that is read where it is, one pending when all is over."""
    x = torch.full((100_000,), float(rank))
    peers = [peer for peer in range(world_size) if peer != rank]
    ops = [dist.P2POp(dist.isend, x, peer) for peer in peers]
    ops += [dist.P2POp(dist.irecv, torch.zeros(100_000), peer) for peer in peers]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    dist.all_reduce(x, group=group)
    assert x[0] == sum(range(world_size))


def _check(before, what, allowed=NOTHING, settle=0.0):
    """``settle``: seconds for what goes on by itself: connections that close, hooks and dumps of what has failed."""
    deadline = time.monotonic() + settle
    while left := resources() - before - allowed:
        assert time.monotonic() < deadline, f"{what}: left are {dict(left)}"
        time.sleep(0.005)


def _come_and_go(rank, world_size, folder, lives):
    before, sizes = resources(), [resident_bytes()]
    for life in range(lives):
        _init(folder, life, rank, world_size)
        _use(rank, world_size)
        assert life > 0 or resources() != before  # what is looked for is there
        dist.destroy_process_group()
        _check(before, f"life {life}")
        sizes.append(resident_bytes())
    return sizes


def _check_lives(what, capsys, world_size, folder, **options):
    shared_memory = set(os.listdir("/dev/shm"))
    start = time.monotonic()
    outcomes = run_ranks(_come_and_go, world_size, None, timeout=150, folder=str(folder), lives=100, **options)
    sizes = [f"{outcomes[0][life] >> 10} KiB" for life in (0, 1, 5, 50, 100)]
    with capsys.disabled():
        print(f"\n100 lives, {what}: {time.monotonic() - start:.1f} s; after 0, 1, 5, 50, 100: {sizes}", end="")
    assert set(os.listdir("/dev/shm")) <= shared_memory
    if not SANITIZED:  # the sanitizers keep what is freed
        for after in outcomes:
            assert after[5] - after[0] < ONCE_BYTES
            assert after[100] - after[5] < 95 * LIFE_BYTES


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_hundred_lives_leave_nothing_behind(transport, tmp_path, capsys):
    _check_lives(transport, capsys, 2, tmp_path, env=TRANSPORTS[transport])


def test_a_hundred_lives_between_hosts_leave_nothing_behind(tmp_path, capsys):
    with Hosts(2) as hosts:
        _check_lives("two hosts", capsys, 4, tmp_path, enter=hosts.enter((0, 0, 1, 1)))


def _abort_and_come_back(rank, world_size, folder, lives):
    before = resources()
    for life in range(lives):
        _init(folder, life, rank, world_size)
        _use(rank, world_size)
        await_all(rank, world_size)  # an abort is the error of what is under way elsewhere
        aborts = rank == life % world_size
        pending = dist.irecv(torch.zeros(8), 1 - rank)
        if aborts:
            dist.group.WORLD._get_backend(torch.device("cpu")).abort()
        with pytest.raises(dist.DistBackendError, match="abort"):
            pending.wait()
        with pytest.raises(dist.DistBackendError, match="abort"):
            dist.all_reduce(torch.ones(8))
        del pending
        dist.destroy_process_group()
        _check(before, f"life {life}", AFTER_FAILURE, settle=SETTLE)
    _init(folder, lives, rank, world_size)
    _use(rank, world_size)
    dist.destroy_process_group()
    return True


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_group_can_be_made_again_after_an_abort(transport, tmp_path):
    options = {"folder": str(tmp_path), "lives": 10, "env": TRANSPORTS[transport]}
    assert all(run_ranks(_abort_and_come_back, 2, None, timeout=200, **options))


def _outlive(rank, world_size, folder, deaths):
    """In each life ranks 0 and 1 are the same processes, and rank 2 is one that is killed."""
    victims = range(2, 2 + deaths)
    if rank in victims:
        _init(folder, rank, 2, 3)
        _use(2, 3)
        dist.barrier()
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    before = resources()
    for life in victims:
        _init(folder, life, rank, 3)
        _use(rank, 3)
        # It is in nobody's way that these are never done: large ones are with their sender until they are received.
        unreceived = [dist.isend(torch.ones(numel), 2, tag=9) for numel in (10, 3_000_000)]
        unsent = dist.irecv(torch.ones(10), 2, tag=9)
        dist.barrier()
        with pytest.raises(dist.DistBackendError, match=r"rank 2 .*its process (died|is gone)"):
            while True:
                dist.all_reduce(torch.ones(1000))
        dist.destroy_process_group()
        del unreceived, unsent
        _check(before, f"life {life}", AFTER_FAILURE, settle=SETTLE)
    _init(folder, "last", rank, 2)
    _use(rank, 2)
    dist.destroy_process_group()
    _check(before, "the last life", AFTER_FAILURE, settle=SETTLE)
    return True


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_group_can_be_made_again_after_a_peers_death(transport, tmp_path):
    options = {"folder": str(tmp_path), "deaths": 4, "env": TRANSPORTS[transport]}
    assert run_ranks(_outlive, 6, None, timeout=150, may_die=range(2, 6), **options)[:2] == [True] * 2


LARGE = 20_000_000  # bytes: 0.8 s of the link, and not so many that UCX asks for the receive first
CUT_SHORT = {
    "recv": lambda tensor, rank: dist.isend(tensor, 0) if rank == 1 else dist.irecv(tensor, 1),
    "recv from any": lambda tensor, rank: dist.isend(tensor, 0) if rank == 1 else dist.irecv(tensor),
    "reduce": lambda tensor, rank: dist.reduce(tensor, 0, async_op=True),
    "all_to_all": lambda tensor, rank: dist.all_to_all_single(tensor, tensor.clone(), async_op=True),
}


def _outlive_senders(rank, world_size, action, folder):
    """In each life rank 0 is the same process, and rank 1 one that is killed when a part of its message has come."""
    begin = CUT_SHORT[action]
    if rank > 0:
        _init(folder, rank, 1, 2)
        dist.barrier()
        work = begin(torch.ones(LARGE, dtype=torch.uint8), 1)
        time.sleep(0.2)
        assert not work.is_completed()
        os.kill(os.getpid(), signal.SIGKILL)
    before = resources()
    for life in range(1, world_size):
        _init(folder, life, 0, 2)
        dist.barrier()
        memory = np.zeros(LARGE, np.uint8)
        memory_of_life = weakref.ref(memory)
        with pytest.raises(dist.DistBackendError, match=r"rank 1 .*its process (died|is gone)"):
            begin(torch.from_numpy(memory), 0).wait()
        dist.destroy_process_group()
        del memory
        _check(before, f"life {life}", AFTER_FAILURE, settle=SETTLE)
        assert memory_of_life() is None
    return True


@pytest.mark.parametrize("action", CUT_SHORT)
def test_a_life_whose_peer_died_in_the_middle_of_a_message_leaves_nothing_behind(action, tmp_path):
    options = {"action": action, "folder": str(tmp_path), "may_die": (1, 2)}
    with Hosts(2, rate="200mbit") as hosts:
        assert run_ranks(_outlive_senders, 3, None, enter=hosts.enter((0, 1, 1)), **options)[0]


MEMBERS = ((0, 1, 2), (0, 1), (1, 2), (2, 0))


def _make_groups(rank, world_size, groups):
    _use(rank, world_size)
    before, sizes = Counter(), []
    for number in range(groups):
        if number == 2 * len(MEMBERS):  # connections between processes, one for all groups, have been made by then
            before = resources()
        members = MEMBERS[number % len(MEMBERS)]
        group = dist.new_group(list(members))
        if rank in members:
            x = torch.full((1000,), float(rank))
            dist.all_reduce(x, group=group)
            assert x[0] == sum(members)
            dist.destroy_process_group(group)
        del group
        if before:
            _check(before, f"group {number}", settle=5)
        sizes.append(private_bytes())
    dist.barrier()
    return sizes


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_hundred_groups_in_one_life_leave_nothing_behind(transport, capsys):
    outcomes = run_ranks(_make_groups, 3, "farandole", timeout=90, env=TRANSPORTS[transport], groups=200)
    with capsys.disabled():
        print(f"\n200 groups, {transport}: {outcomes[0][20] >> 10} KiB -> {outcomes[0][-1] >> 10} KiB", end="")
    if not SANITIZED:
        for sizes in outcomes:
            assert sizes[-1] - sizes[20] < 180 * GROUP_BYTES


def test_the_resources_that_are_counted_are_seen(tmp_path):
    before = resources()
    fd = os.memfd_create("farandole-test")
    try:
        assert resources() - before == {"descriptor /memfd:farandole-test (deleted)": 1}
    finally:
        os.close(fd)
    assert resources() == before
    assert sum(count for what, count in before.items() if what.startswith("thread ")) >= 1
