"""Packed exchanges give what all-to-alls of each tensor give."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist

from farandole.sparse._exchange_group import ExchangeGroup
from farandole.sparse._packing import PackedExchange, SingleExchanges, can_pack
from support.devices import DEVICE, ON_CPU
from support.processes import run_ranks

TYPES = [torch.int64, torch.int32, torch.float32, torch.float64, torch.int8, torch.bool, torch.bfloat16]


def compare(rank: int, world_size: int, seed: int) -> None:
    pick = random.Random(seed)  # the same on all ranks
    for _ in range(20):
        types = [pick.choice(TYPES) for _ in range(pick.randint(1, 6))]
        counts = [[[pick.choice([0, 1, 3, 100]) for _ in range(world_size)] for _ in range(world_size)] for _ in types]
        sent = [of_type[rank] for of_type in counts]
        received = [[row[rank] for row in of_type] for of_type in counts]
        tensors = [torch.randint(0, 2, (sum(n),)).to(dtype) for n, dtype in zip(sent, types, strict=True)]
        kind = pick.choice([PackedExchange, SingleExchanges]) if ON_CPU else SingleExchanges
        exchange = kind(ExchangeGroup(dist.group.WORLD, torch.device(DEVICE)), tensors, sent, received)
        for tensor, out, into, got in zip(tensors, sent, received, exchange.wait(), strict=True):
            expected = tensor.new_empty(sum(into))
            dist.all_to_all_single(expected, tensor, into, out)
            assert got.dtype == tensor.dtype and torch.equal(got, expected)


@pytest.mark.parametrize("world_size", [2, 3])
def test_packed_tensors_are_those_of_single_exchanges(world_size):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_ranks(compare, world_size, "farandole", seed=seed)


def test_only_flat_tensors_on_cpu_are_packed():
    flat = torch.zeros(4)
    assert can_pack([flat, flat.int()], 4)
    assert not can_pack([flat.view(2, 2)], 4)
    assert not can_pack([torch.zeros(8)[::2]], 4)
    assert not can_pack([flat] * 9, 32)
    assert not can_pack([torch.zeros(4, device="meta")], 4)
