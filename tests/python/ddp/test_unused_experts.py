"""Experts that get no gradient, under the policy "skip": what counts is whether a replica of the same one has."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS

from farandole.ddp import DistributedDataParallel
from support.processes import run_ranks


class _Experts(torch.nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = torch.nn.Linear(3, 3)
        torch.manual_seed(1 + number)
        self.expert = torch.nn.Linear(3, 3)
        for parameter in self.expert.parameters():
            parameter.allreduce = False

    def forward(self, x: torch.Tensor, uses_expert: bool) -> torch.Tensor:
        x = self.dense(x)
        return (x + self.expert(x) if uses_expert else x).square().sum()


def _skips(rank: int, world_size: int, replicas: int, in_fp32: bool) -> None:
    """The last rank alone uses its expert in the second round, whose gradients replicas of it get."""
    groups = [dist.new_group(list(range(first, first + replicas))) for first in range(0, world_size, replicas)]
    number = rank // replicas
    is_used = number == len(groups) - 1
    model = DistributedDataParallel(
        _Experts(number),
        unused_parameters="skip",
        expert_process_group=groups[number],
        grad_reduce_in_fp32=in_fp32,
        bucket_size=1,
    )
    weight = model.module.expert.weight
    for round_ in range(3):
        model.zero_grad()
        model(torch.full((2, 3), 1.0 + rank), rank == world_size - 1).backward()
        if not in_fp32:
            assert (weight.grad is not None) == is_used, round_
    model.zero_grad()
    model(torch.full((2, 3), 1.0 + rank), True).backward()
    first = weight.main_grad.clone()
    if is_used:  # experts that have fewer replicas are no average to be added to
        for parameter in model.module.expert.parameters():
            parameter.main_grad.zero_()
    model(torch.full((2, 3), 2.0 + rank), rank == world_size - 1).backward()
    assert torch.equal(weight.main_grad, first) != is_used


@pytest.mark.parametrize("in_fp32", [False, True])
@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_expert_that_no_replica_of_it_has_used_keeps_its_gradient(backend, replicas, in_fp32):
    run_ranks(_skips, 2 * replicas, backend, timeout=60, replicas=replicas, in_fp32=in_fp32)
