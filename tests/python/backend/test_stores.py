"""Groups that meet in a store in which earlier ones have met, as in that of torchrun's agent."""

import datetime
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.hosts import PretendHost
from support.processes import run_ranks

pytestmark = only_on_cpu("groups meet on the CPU")

WORLD_SIZE = 3
VICTIM = 1


@pytest.fixture
def port():
    """Of a store that outlives the ranks."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield server.port
    del server


def _init(rank, world_size, port, seconds=30):
    store = dist.TCPStore("127.0.0.1", port)
    limit = datetime.timedelta(seconds=seconds)
    dist.init_process_group("farandole", store=store, rank=rank, world_size=world_size, timeout=limit)


def _sums(rank, world_size):
    """Of the world, and of a group of some of it."""
    ones = torch.ones(3)
    dist.all_reduce(ones)
    some = dist.new_group([0, 2])
    if rank != 1:
        dist.all_reduce(ones, group=some)
    dist.barrier()
    return ones.tolist()


def _live(rank, world_size, port, lives):
    sums = []
    for life in range(lives):
        if rank == life % world_size:
            time.sleep(0.2)  # the others find what the life before has left
        _init(rank, world_size, port)
        sums.append(_sums(rank, world_size))
        dist.destroy_process_group()
    return sums


def _check(outcomes, lives):
    assert outcomes == [
        [[2.0 * WORLD_SIZE if rank != 1 else 1.0 * WORLD_SIZE] * 3] * lives for rank in range(WORLD_SIZE)
    ]


@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 1)], ids=str)
def test_processes_meet_again_and_again_in_one_store_and_others_after_them(port, hosts):
    for lives in (4, 2):
        _check(run_ranks(_live, WORLD_SIZE, None, enter=PretendHost(hosts), port=port, lives=lives), lives)


def _be_killed(rank, world_size, port):
    _init(rank, world_size, port)
    _sums(rank, world_size)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(dist.DistBackendError):
        dist.barrier()
    return True


def test_the_next_processes_meet_in_the_store_of_those_of_which_one_was_killed(port):
    run_ranks(_be_killed, WORLD_SIZE, None, may_die={VICTIM}, port=port)
    _check(run_ranks(_live, WORLD_SIZE, None, port=port, lives=1), 1)


def _miss_one(rank, world_size, port, again):
    """A meeting that one does not come to; and the next one."""
    if rank != VICTIM:
        with pytest.raises(dist.DistBackendError, match="rank 1 of 3 did not join the group within 1000 ms"):
            _init(rank, world_size, port, seconds=1)
    if not again:
        return True
    if rank == 0:
        time.sleep(2)  # until all have heard of it
    return _live(rank, world_size, port, 2)


def test_a_meeting_that_has_failed_is_not_taken_for_the_next_one(port):
    run_ranks(_miss_one, WORLD_SIZE, None, port=port, again=False)
    restarted = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    _check(run_ranks(_live, WORLD_SIZE, None, env=restarted, port=port, lives=2), 2)


def test_who_has_seen_a_meeting_fail_waits_for_the_next_one(port):
    outcomes = run_ranks(_miss_late, WORLD_SIZE, None, port=port)
    _check(outcomes, 2)


def _miss_late(rank, world_size, port):
    if rank == VICTIM:
        time.sleep(1.5)  # it comes to the one that has failed, and is told
        with pytest.raises(dist.DistBackendError, match="given the group up"):
            _init(rank, world_size, port)
        return _live(rank, world_size, port, 2)
    return _miss_one(rank, world_size, port, again=True)


class _LateNews(dist.Store):
    """A store whose answer that rank 0 has not come yet arrives when that one has come, met all and left."""

    def __init__(self, store):
        super().__init__()
        self.store = store
        self.is_late = False

    def check(self, keys):
        if not self.is_late or not keys[0].endswith("network/0"):
            return self.store.check(keys)
        self.is_late = False
        self.store.wait(["left"])
        time.sleep(0.5)  # until this process has heard of it
        return False

    def set(self, key, value):
        self.store.set(key, value)

    def get(self, key):
        return self.store.get(key)

    def add(self, key, amount):
        return self.store.add(key, amount)


def _meet_and_leave(rank, world_size, port):
    store = dist.TCPStore("127.0.0.1", port)
    late = _LateNews(store)
    dist.init_process_group("farandole", store=late if rank == 1 else store, rank=rank, world_size=world_size)
    late.is_late = True
    dist.new_group()
    dist.destroy_process_group()
    if rank == 0:
        store.set("left", "")
    return late.is_late


def test_a_group_is_made_though_who_has_met_all_has_left_already(port):
    # Over UCX alone who has met all needs nobody any more.
    assert run_ranks(_meet_and_leave, 2, None, env={"FARANDOLE_TRANSPORT": "ucx"}, port=port) == [True, False]
