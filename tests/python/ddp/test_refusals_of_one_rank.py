"""Arguments that one rank alone gets wrong: the others do not wait for it, and hear why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS

from farandole import megatron
from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.processes import await_all, run_ranks

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"bucket_cap_mb": -1}, "bucket_cap_mb=-1: expected more than 0"),
    ({"overlap_param_gather": True}, "overlap_param_gather=True: expected use_distributed_optimizer=True"),
    ({"unused_parameters": "maybe"}, "maybe"),
    ({"device_ids": [99]}, "device_ids=[99]"),
]


# Of any object with some of a config's fields.
WRONG_CONFIGS: list[tuple[Any, str]] = [
    (SimpleNamespace(overlap_param_gather=True), "ddp_config.overlap_param_gather is True: expected use_distributed"),
    (SimpleNamespace(nccl_ub=True), "ddp_config.nccl_ub is True, expected False: it is not supported"),
    (SimpleNamespace(bucket_size="a"), "ddp_config.bucket_size is 'a', expected a whole number"),
    (SimpleNamespace(bucket_size=True), "ddp_config.bucket_size is True, expected a whole number"),
    (SimpleNamespace(bucket_size=0, overlap_grad_reduce=True), "bucket_size=0: expected at least 1 element"),
    (SimpleNamespace(num_buckets=1.5), "ddp_config.num_buckets is 1.5, expected a whole number"),
    (
        SimpleNamespace(num_buckets=0),
        "ddp_config.num_buckets is 0 and bucket_size None: expected one of them, at least 1",
    ),
    (SimpleNamespace(num_distributed_optimizer_instances=0), "num_distributed_optimizer_instances is 0"),
    (
        SimpleNamespace(num_distributed_optimizer_instances=2),
        "num_distributed_optimizer_instances is 2: expected use_d",
    ),
    (SimpleNamespace(grad_reduce_in_fp32="yes"), "ddp_config.grad_reduce_in_fp32 is 'yes', expected True or False"),
    (SimpleNamespace(overlap_grad_reduce=None), "ddp_config.overlap_grad_reduce is None, expected True or False"),
    (SimpleNamespace(use_distributed_optimizer=3), "ddp_config.use_distributed_optimizer is 3, expected True or False"),
    (
        SimpleNamespace(check_for_large_grads="a"),
        "ddp_config.check_for_large_grads is 'a', expected False or the largest",
    ),
    (None, "ddp_config is None: expected a DistributedDataParallelConfig"),
    ({"bucket_size": 1}, "ddp_config is {'bucket_size': 1}: expected a DistributedDataParallelConfig"),
]


def _wrap_for_megatron(ddp_config: Any) -> str:
    groups = SimpleNamespace(dp=dist.group.WORLD, dp_cp=dist.group.WORLD)
    try:
        megatron.DistributedDataParallel(SimpleNamespace(), ddp_config, torch.nn.Linear(2, 2), pg_collection=groups)
    except (ValueError, TypeError, NotImplementedError) as error:
        return str(error)
    return ""


def _refuse_configs(rank: int, world_size: int) -> None:
    for culprits in ([1], range(world_size)):
        for wrong, text in WRONG_CONFIGS:
            said = _wrap_for_megatron(wrong if rank in culprits else SimpleNamespace(bucket_size=40e6))
            assert text in said, (rank, culprits, wrong, said)
            assert rank in culprits or f"rank {culprits[0]}: " in said, (rank, culprits, said)
    assert _wrap_for_megatron(SimpleNamespace()) == ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_config_that_one_rank_is_refused_is_an_error_on_all(backend):
    run_ranks(_refuse_configs, 3, backend, timeout=60)


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
    with pytest.raises((TypeError, ValueError), match=r"module is a int: expected a torch.nn.Module"):
        DistributedDataParallel(3 if rank == 1 else torch.nn.Linear(2, 2))
    no_group = dist.GroupMember.NON_GROUP_MEMBER if rank == 1 else None
    with pytest.raises(
        ValueError, match=r"instance_process_group=.*: expected a ProcessGroup that this rank .1. is in"
    ):
        DistributedDataParallel(torch.nn.Linear(2, 2), instance_process_group=no_group)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))  # the group is usable
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises((TypeError, ValueError), match=r"optimizer is a int: expected a torch.optim.Optimizer"):
        DistributedOptimizer(3 if rank == 1 else plain, model)
    DistributedOptimizer(plain, model)
    model(torch.ones(1, 2)).sum().backward()
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_one_rank_is_refused_is_an_error_on_all(backend):
    run_ranks(_refuse, 3, backend, timeout=60)
