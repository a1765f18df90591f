"""A sender that is ahead of its receiver: what the receiver keeps of its messages is bounded, and nothing depends on it."""

import datetime
import os
import random
import re
import signal
import time

import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.hosts import PretendHost
from support.processes import await_all, run_ranks
from support.resources import private_bytes
from support.sanitizers import SANITIZED

pytestmark = only_on_cpu("it is about the host's memory")

PLACES = {"one host": None, "two hosts": PretendHost((0, 1))}
WORDS = 1024  # 8 KB
COUNT = 100_000
MIB = 1 << 20


def _run(fn, place, world_size=2, unexpected=None, **kwargs):
    env = {"FARANDOLE_UNEXPECTED_BYTES": unexpected} if unexpected else {}
    return run_ranks(fn, world_size, "farandole", enter=PLACES[place], env=env, **kwargs)


def _run_ahead(rank, world_size, count):
    """What the receiver's memory has grown by while the sender was ahead, and how far that came."""
    store = dist.distributed_c10d._get_default_store()
    message = torch.zeros(WORDS, dtype=torch.int64)
    if rank == 0:
        dist.send(message, 1)  # connects
        begun = time.monotonic()
        for i in range(count):
            dist.send(message.fill_(i), 1)
            if i % 1000 == 0:
                store.set("sent", str(i))
        return time.monotonic() - begun
    dist.recv(message, 0)
    before, sent, deadline = private_bytes(), -1, time.monotonic() + 60
    while (now := int(store.get("sent"))) != sent and now < count - 1000 and time.monotonic() < deadline:
        sent = now
        time.sleep(1)
    grown = private_bytes() - before
    for i in range(count):
        dist.recv(message, 0)
        assert message[0] == i and message[-1] == i and (i % 1000 or bool((message == i).all())), i
    return grown, now


@pytest.mark.skipif(SANITIZED, reason="the sanitizers' memory is not bounded so")
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("unexpected", "limit"), [(None, 32 * MIB), ("4M", 4 * MIB)])
@pytest.mark.parametrize("place", PLACES)
def test_what_a_receiver_keeps_of_who_is_ahead_is_bounded(place, unexpected, limit, capsys):
    _, (grown, sent) = _run(_run_ahead, place, unexpected=unexpected, timeout=200, count=COUNT)
    with capsys.disabled():
        print(f"\n{place}: {grown / MIB:.1f} MiB after {sent} of {COUNT} messages", end="")
    assert grown < 1.5 * limit + 8 * MIB
    assert sent < COUNT / 2


def _receive_in_any_order(rank, world_size, seed):
    """Rank 0 is ahead on every tag and group; rank 1 takes one after the other, in another order, and all at the end."""
    choices = random.Random(seed)
    groups = [None, dist.new_group(), dist.new_group()]
    streams = [(group, tag) for group in range(3) for tag in range(3)]
    sizes = {stream: [choices.choice([0, 1, 900, 1024, 5000]) for _ in range(150)] for stream in streams}
    order = choices.sample(streams, len(streams))
    if rank == 0:
        works = []
        for i in range(150):
            for group, tag in streams:
                content = torch.full((sizes[group, tag][i],), i * 100 + group * 10 + tag)
                works.append(dist.isend(content, 1, groups[group], tag))
        total = torch.ones(3)
        dist.all_reduce(total)
        for work in works:
            work.wait()
        return total.tolist()
    total = torch.ones(3)
    dist.all_reduce(total)  # of a group with messages that nobody has received yet
    for group, tag in order:
        for i, size in enumerate(sizes[group, tag]):
            content = torch.empty(size, dtype=torch.int64)
            source = dist.recv(content, None if choices.random() < 0.3 else 0, groups[group], tag)
            assert source == 0 and bool((content == i * 100 + group * 10 + tag).all()), (group, tag, i)
    return total.tolist()


@pytest.mark.parametrize("place", PLACES)
def test_messages_of_other_tags_and_groups_come_past_those_that_nobody_wants(place):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    assert _run(_receive_in_any_order, place, unexpected="64K", seed=seed) == [[2.0] * 3] * 2


def _send_until_held(rank, world_size, end):
    """Rank 0 sends what rank 1 does not receive, until an error ends that."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=2 if end == "timeout" else 60))
    dist.barrier(group)
    if rank == 1:
        if end == "kill":
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGKILL)
        if end == "leave":
            time.sleep(1)
            dist.destroy_process_group()
        else:
            await_all(rank, world_size)
        return None
    message, sent, began = torch.zeros(WORDS, dtype=torch.int64), 0, time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        while sent < 1000:
            dist.send(message, 1, group)
            sent += 1
    took = time.monotonic() - began
    if end == "timeout":
        await_all(rank, world_size)
    return sent, took, str(error.value)


@pytest.mark.parametrize("place", PLACES)
def test_a_sender_that_waits_for_its_receiver_in_vain_is_told_for_whom(place):
    (sent, took, message), _ = _run(_send_until_held, place, unexpected="64K", timeout=30, end="timeout")
    assert sent < 100 and took < 8
    assert re.search(r"send to rank 1 \(.*not done after its timeout of", message, re.DOTALL), message


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("end", ["kill", "leave"])
def test_a_sender_that_waits_for_a_receiver_that_ends_is_told(place, end):
    may_die = {1} if end == "kill" else ()
    (sent, took, message), _ = _run(_send_until_held, place, unexpected="64K", timeout=30, may_die=may_die, end=end)
    assert sent < 100 and took < 6
    assert "rank 1" in message, message


def _leave_unreceived(rank, world_size):
    """Groups that end with messages that nobody has received; others go on."""
    for _ in range(5):
        group = dist.new_group(timeout=datetime.timedelta(seconds=20))
        works = [dist.isend(torch.zeros(WORDS, dtype=torch.int64), 1, group) for _ in range(40)] if rank == 0 else []
        dist.barrier(group)
        dist.destroy_process_group(group)
        del works, group
        messages = [dist.isend, dist.irecv]
        for i in range(20):
            content = torch.full((WORDS,), i if rank == 0 else -1)
            messages[rank](content, 1 - rank).wait()
            assert bool((content == i).all())
    dist.barrier()
    return True


@pytest.mark.parametrize("place", PLACES)
def test_a_group_that_ends_with_messages_unreceived_leaves_the_others_as_they_are(place):
    assert _run(_leave_unreceived, place, unexpected="64K") == [True, True]


def _destroy_with_unreceived(rank, world_size, groups, is_late):
    """Groups that rank 1 leaves with messages of rank 0's unreceived; is_late: sent after it has left. Then a small
    message, which must be on its way though nobody receives it yet, and what rank 1's memory has grown by."""
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    before = private_bytes()
    for i in range(groups):
        group = dist.new_group(timeout=datetime.timedelta(seconds=20))
        dist.barrier(group)
        if rank == 1 and is_late:
            dist.destroy_process_group(group)
            store.set(f"left {i}", "")
        if rank == 0:
            if is_late:
                store.wait([f"left {i}"])
            works = [dist.isend(torch.zeros(WORDS, dtype=torch.int64), 1, group) for _ in range(512)]
            store.set(f"sent {i}", "")
        else:
            store.wait([f"sent {i}"])
            works = []
        dist.barrier()
        if rank == 0 or not is_late:
            dist.destroy_process_group(group)
        del works, group
    dist.barrier()
    grown = private_bytes() - before
    if rank == 0:
        # What comes late over UCX is credited four times a second; a send before that waits for its own receive.
        time.sleep(0.5)
        began = time.monotonic()
        small = dist.isend(torch.ones(1), 1)
        small.wait(datetime.timedelta(seconds=5))
        took = time.monotonic() - began
        store.set("small", "")
        return took
    store.wait(["small"])
    assert dist.recv(torch.zeros(1), 0) == 0
    return grown


@pytest.mark.skipif(SANITIZED, reason="the sanitizers' memory is not bounded so")
@pytest.mark.parametrize("is_late", [False, True], ids=["before", "late"])
@pytest.mark.parametrize("place", PLACES)
def test_what_a_group_that_ended_has_not_received_is_let_go_of(place, is_late, capsys):
    took, grown = _run(
        _destroy_with_unreceived, place, unexpected="64M", timeout=100, groups=12, is_late=is_late
    )  # 48 MiB
    with capsys.disabled():
        print(f"\n{place}: {grown / MIB:.1f} MiB", end="")
    assert grown < 24 * MIB
    took, _ = _run(_destroy_with_unreceived, place, unexpected="64K", timeout=100, groups=4, is_late=is_late)
    assert took < 2


def _send_to_who_has_left(rank, world_size):
    store = dist.distributed_c10d._get_default_store()
    group = dist.new_group(timeout=datetime.timedelta(seconds=60))
    dist.barrier(group)
    if rank == 1:
        dist.destroy_process_group(group)
        store.set("left", "")
        await_all(rank, world_size)
        return None
    store.wait(["left"])
    began = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        dist.send(torch.zeros(1 << 20), 1, group)
    took = time.monotonic() - began
    await_all(rank, world_size)
    return took, str(error.value)


def test_a_sender_of_much_is_told_that_its_receiver_has_left_the_group():
    (took, message), _ = _run(_send_to_who_has_left, "one host", timeout=30)
    assert took < 5
    assert re.search(r"rank 1 \(.*(left|over)", message, re.DOTALL), message
