"""Tensors that are exchanged together are those of all-to-alls of each."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from farandole.sparse._exchange_group import ExchangeGroup
from support.devices import DEVICE, only_on_cpu
from support.processes import run_ranks

TYPES = [torch.int64, torch.int32, torch.float32, torch.float64, torch.int8, torch.bool, torch.bfloat16]


def compare(rank: int, world_size: int, seed: int) -> None:
    pick = random.Random(seed)  # the same on all ranks
    group = ExchangeGroup(dist.group.WORLD, torch.device(DEVICE))
    for _ in range(20):
        types = [pick.choice(TYPES) for _ in range(pick.randint(1, 6))]
        counts = [[[pick.choice([0, 1, 3, 100]) for _ in range(world_size)] for _ in range(world_size)] for _ in types]
        sent = [of_type[rank] for of_type in counts]
        received = [[row[rank] for row in of_type] for of_type in counts]
        tensors = [torch.randint(0, 2, (sum(n),)).to(dtype) for n, dtype in zip(sent, types, strict=True)]
        exchange = group.packed([tensor.clone() for tensor in tensors], sent)
        group.start_tensors(exchange, received)
        arrived = group.finish_tensors(exchange)
        for tensor, out, into, got in zip(tensors, sent, received, arrived, strict=True):
            expected = tensor.new_empty(sum(into))
            dist.all_to_all_single(expected, tensor, into, out)
            assert got.dtype == tensor.dtype and torch.equal(got, expected)


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_tensors_of_one_exchange_are_those_of_single_ones(world_size, backend):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_ranks(compare, world_size, backend, seed=seed)


def lose_a_rank(rank: int, world_size: int) -> None:
    group = ExchangeGroup(dist.group.WORLD, torch.device(DEVICE))
    with pytest.raises(RuntimeError, match="tensor 0 has 2 rows"):
        group.packed([torch.zeros(2)], [[1, 2]])
    exchange = group.packed([torch.zeros(2)], [[1, 1]])
    with pytest.raises(RuntimeError, match="tensor 0 has splits"):
        group.start_tensors(exchange, [[2, 1], [1, 2]][rank : rank + 1])
    assert not group.has_failed
    if rank == 1:
        group.give_up(ValueError("broken"), "stage")
        return
    group.start_tensors(exchange, [[1, 1]])
    for _ in range(2):
        with pytest.raises(RuntimeError):
            group.finish_tensors(exchange)
    assert group.has_failed


@only_on_cpu("for a wait on the host that another rank can end")
def test_an_exchange_that_cannot_end_has_failed_and_one_that_was_refused_has_not():
    run_ranks(lose_a_rank, 2, "gloo")
