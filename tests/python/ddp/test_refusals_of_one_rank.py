"""Arguments that one rank alone gets wrong: the others do not wait for it, and hear why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS

from farandole import megatron
from farandole.ddp import DistributedDataParallel
from support.processes import await_all, run_ranks

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"bucket_cap_mb": -1}, "bucket_cap_mb=-1: expected more than 0"),
    ({"overlap_param_gather": True}, "overlap_param_gather=True: expected use_distributed_optimizer=True"),
    ({"unused_parameters": "maybe"}, "maybe"),
    ({"device_ids": [99]}, "device_ids=[99]"),
]


def _wrap(wrong: dict[str, Any]) -> str:
    try:
        DistributedDataParallel(torch.nn.Linear(2, 2), **wrong)
    except ValueError as error:
        return str(error)
    return ""


def _refuse(rank: int, world_size: int) -> None:
    for culprits in ([1], [0], range(world_size)):
        for wrong, text in WRONG:
            said = _wrap(wrong if rank in culprits else {})
            assert text in said, (rank, culprits, wrong, said)
            assert rank in culprits or f"rank {culprits[0]}: " in said, (rank, culprits, said)
    with pytest.raises(ValueError, match="rank 0 has init_sync: False; rank 1 has init_sync: True"):
        DistributedDataParallel(torch.nn.Linear(2, 2), init_sync=rank > 0)
    lazy = torch.nn.LazyLinear(2) if rank == 1 else torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match="parameter 'weight' is uninitialized"):
        DistributedDataParallel(lazy)
    module = torch.nn.Linear(2, 2)
    module.weight.allreduce = rank != 1  # type: ignore[attr-defined]
    groups = SimpleNamespace(dp=dist.group.WORLD, dp_cp=dist.group.WORLD)
    with pytest.raises(ValueError, match="parameter 'weight' is an expert: expected a group expt_dp"):
        megatron.DistributedDataParallel(
            SimpleNamespace(), megatron.DistributedDataParallelConfig(), module, pg_collection=groups
        )
    model = DistributedDataParallel(torch.nn.Linear(2, 2))  # the group is usable
    model(torch.ones(1, 2)).sum().backward()
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_one_rank_is_refused_is_an_error_on_all(backend):
    run_ranks(_refuse, 3, backend, timeout=60)
