"""Tensors of more than two gibibytes arrive whole: every byte is compared, and no two pieces of them are alike."""

import functools

import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.processes import run_ranks

pytestmark = only_on_cpu("they are of the host's memory")

BYTES = (2 << 30) + (100 << 20) + 6  # a multiple of two
PERIOD = 16_777_213  # a prime: what is a power of two apart is not alike
TRANSPORTS = {"shm": {}, "ucx": {"FARANDOLE_TRANSPORT": "ucx"}}


@functools.cache
def _noise():
    return torch.randint(0, 256, (PERIOD,), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


def _pattern(first, numel, rank):
    """What ``rank`` has in bytes ``first`` to ``first + numel``, up to PERIOD of them."""
    start = (first + 1_000_003 * rank) % PERIOD
    return torch.cat([_noise()[start : start + numel], _noise()[: max(0, start + numel - PERIOD)]])


def _pieces(numel):
    """A part at a time, so that no second array is needed."""
    step = 8 << 20
    return ((first, min(step, numel - first)) for first in range(0, numel, step))


def _fill(x, rank):
    for at, n in _pieces(x.numel()):
        x[at : at + n] = _pattern(at, n, rank)


def _check(x, ranks, first=0):
    """``x`` is the sum of what ``ranks`` have from ``first`` on, modulo 256."""
    for at, n in _pieces(x.numel()):
        expected = torch.zeros(n, dtype=torch.uint8)
        for rank in ranks:
            expected += _pattern(first + at, n, rank)
        assert torch.equal(x[at : at + n], expected), f"bytes {at} to {at + n} differ"


def _send(rank, world_size):
    x = torch.zeros(BYTES, dtype=torch.uint8)
    if rank == 0:
        _fill(x, 0)
        dist.send(x, 1)
    else:
        dist.recv(x, 0)
        _check(x, [0])


def _all_reduce(rank, world_size):
    x = torch.empty(BYTES, dtype=torch.uint8)
    _fill(x, rank)
    dist.all_reduce(x)
    _check(x, range(world_size))


def _broadcast(rank, world_size):
    x = torch.zeros(BYTES, dtype=torch.uint8)
    if rank == 1:
        _fill(x, 1)
    dist.broadcast(x, 1)
    _check(x, [1])


def _all_gather_into_tensor(rank, world_size):
    part, whole = torch.empty(BYTES // 2, dtype=torch.uint8), torch.zeros(BYTES, dtype=torch.uint8)
    _fill(part, rank)
    dist.all_gather_into_tensor(whole, part)
    for other, got in enumerate(whole.chunk(world_size)):
        _check(got, [other])


def _reduce_scatter_tensor(rank, world_size):
    part, whole = torch.zeros(BYTES // 2, dtype=torch.uint8), torch.empty(BYTES, dtype=torch.uint8)
    _fill(whole, rank)
    dist.reduce_scatter_tensor(part, whole)
    _check(part, range(world_size), first=rank * part.numel())
    _check(whole, [rank])


def _all_to_all_single(rank, world_size):
    into, x = torch.zeros(BYTES, dtype=torch.uint8), torch.empty(BYTES, dtype=torch.uint8)
    _fill(x, rank)
    dist.all_to_all_single(into, x)
    for other, got in enumerate(into.chunk(world_size)):
        _check(got, [other], first=rank * got.numel())


def _reduce(rank, world_size):
    x = torch.empty(BYTES, dtype=torch.uint8)
    _fill(x, rank)
    dist.reduce(x, 1)
    _check(x, range(world_size) if rank == 1 else [rank])


def _gather(rank, world_size):
    x = torch.empty(BYTES, dtype=torch.uint8)
    _fill(x, rank)
    into = [torch.zeros(BYTES, dtype=torch.uint8) for _ in range(world_size)] if rank == 1 else None
    dist.gather(x, into, 1)
    for other, got in enumerate(into or []):
        _check(got, [other])


def _scatter(rank, world_size):
    into, parts = torch.zeros(BYTES, dtype=torch.uint8), None
    if rank == 1:
        parts = [torch.empty(BYTES, dtype=torch.uint8) for _ in range(world_size)]
        for other, part in enumerate(parts):
            _fill(part, other)
    dist.scatter(into, parts, 1)
    _check(into, [rank])


OPERATIONS = [
    _send, _all_reduce, _broadcast, _all_gather_into_tensor, _reduce_scatter_tensor, _all_to_all_single, _reduce,
    _gather, _scatter,
]  # fmt: skip


@pytest.mark.sample(1)
@pytest.mark.timeout(400)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_tensors_of_more_than_two_gibibytes_arrive_whole(operation, transport):
    run_ranks(operation, 2, "farandole", timeout=300, env=TRANSPORTS[transport])
