"""A small message does not wait for the megabytes that a collective of the same processes moves."""

from __future__ import annotations

import os
import signal
import statistics
import time

import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.hosts import Hosts
from support.processes import run_ranks

pytestmark = only_on_cpu("it is about the CPU side's transports")


def _exchange(rank: int, message: torch.Tensor) -> float:
    """Seconds of a message there and another one back."""
    start = time.perf_counter()
    if rank == 0:
        dist.send(message, 1)
        dist.recv(message, 1)
    else:
        dist.recv(message, 0)
        dist.send(message, 0)
    return time.perf_counter() - start


def _exchanges(rank: int, world_size: int, mebibytes: int, rounds: int, each: int) -> list[tuple[float, list[float]]]:
    """By round: seconds of an all_reduce of another group, and of exchanges while it is under way."""
    torch.set_num_threads(1)
    other = dist.new_group()
    data = torch.ones(mebibytes << 18)
    message = torch.zeros(64 << 10, dtype=torch.uint8)
    for _ in range(20):
        _exchange(rank, message)
    found = []
    for number in range(rounds + 1):
        data.fill_(1.0 + rank)
        dist.barrier()
        start = time.perf_counter()
        work = dist.all_reduce(data, group=other, async_op=True)
        taken = [_exchange(rank, message) for _ in range(each)]
        work.wait()
        if number > 0:  # pages are there, and connections
            found.append((time.perf_counter() - start, taken))
        assert data.eq(3.0).all()
    return found


def test_between_hosts_a_message_does_not_queue_behind_a_reduction():
    with Hosts(2, rate="200mbit") as hosts:
        results = run_ranks(
            _exchanges, 2, "farandole", timeout=60, enter=hosts.enter((0, 1)), mebibytes=16, rounds=3, each=3
        )
    for reduction, exchanges in results[0]:
        print(f"reduction {1e3 * reduction:.0f} ms, exchanges", *(f"{1e3 * one:.1f}" for one in exchanges), "ms")
    longest = [max(exchanges) / reduction for reduction, exchanges in results[0]]
    assert statistics.median(longest) < 0.2  # a queue of all that one step of it sends is half of it


def test_on_one_host_a_message_does_not_wait_for_a_reduction():
    results = run_ranks(_exchanges, 2, "farandole", timeout=60, mebibytes=128, rounds=15, each=1)
    reduction = statistics.median(reduction for reduction, _ in results[0])
    exchange = statistics.median(one for _, exchanges in results[0] for one in exchanges)
    print(f"reduction {1e3 * reduction:.1f} ms, exchange {1e3 * exchange:.2f} ms")
    assert exchange < 0.2 * reduction


def _sends_and_leaves(rank: int, world_size: int) -> bool:
    data = torch.arange(1 << 18, dtype=torch.float32)
    dist.all_reduce(torch.ones(1 << 20))
    if rank == 1:
        dist.send(data, 0)
        dist.destroy_process_group()
        return True
    time.sleep(1.0)  # the other one has left, on all of its connections
    received = torch.zeros_like(data)
    dist.recv(received, 1)
    return torch.equal(received, data)


def test_what_was_sent_before_its_sender_left_is_received():
    with Hosts(2) as hosts:
        assert all(run_ranks(_sends_and_leaves, 2, "farandole", timeout=30, enter=hosts.enter((0, 1))))


def _loses_its_peer(rank: int, world_size: int) -> list[str]:
    other = dist.new_group()
    dist.all_reduce(torch.ones(1 << 20), group=other)
    message = torch.zeros(8)
    _exchange(rank, message)
    work = dist.all_reduce(torch.ones(1 << 24), group=other, async_op=True) if rank == 0 else None
    receive = dist.irecv(message, 1) if rank == 0 else None
    if work is None or receive is None:
        os.kill(os.getpid(), signal.SIGKILL)
    errors = []
    for one in (work, receive):
        with pytest.raises(RuntimeError) as raised:
            one.wait()
        errors.append(str(raised.value))
    return errors


def test_a_death_ends_messages_and_reductions():
    with Hosts(2) as hosts:
        errors = run_ranks(_loses_its_peer, 2, "farandole", timeout=30, enter=hosts.enter((0, 1)), may_die=[1])[0]
    assert all("rank 1" in error for error in errors), errors
