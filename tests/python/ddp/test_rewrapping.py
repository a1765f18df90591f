"""A module that is wrapped again, while the old wrapper or what it has started is still there."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import seeded
from support.processes import await_all, run_ranks

RATE = 0.125


def _model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Tanh(), torch.nn.Linear(300, 64))


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=seeded(10 * step + rank))


def _plain(world_size: int, steps: int) -> list[torch.Tensor]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), RATE, momentum=0.5)
    for step in range(steps):
        optimizer.zero_grad()
        for rank in range(world_size):
            (model(_batch(rank, step)).square().mean() / world_size).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def _wrap_twice(rank: int, world_size: int, options: dict[str, Any]) -> None:
    old = DistributedDataParallel(_model(), **options)
    stale = DistributedOptimizer(torch.optim.SGD(old.parameters(), RATE), old)
    model = DistributedDataParallel(old.module, **options)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), RATE, momentum=0.5), model)
    for step in range(3):
        optimizer.zero_grad()
        model(_batch(rank, step)).square().mean().backward()
        optimizer.step()
    for got, want in zip(model.parameters(), _plain(world_size, 3), strict=True):
        torch.testing.assert_close(got.detach(), want)
    assert len(list(old.parameters())) == len(list(model.parameters()))
    for use in (lambda: old(_batch(rank, 0)), stale.step):
        with pytest.raises(RuntimeError, match=r"parameter '0\.weight' was wrapped again"):
            use()


@pytest.mark.sample(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options", [{"bucket_size": 500}, {"gradient_as_bucket_view": True}, {"use_distributed_optimizer": True}]
)
def test_the_newest_wrapper_of_a_module_averages_alone(backend, options):
    run_ranks(_wrap_twice, 2, backend, timeout=60, options=options)


def _wrap_while_gathered(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    module = torch.nn.Sequential(*(torch.nn.Linear(700, 700, bias=False) for _ in range(6)))
    before = copy.deepcopy(module)
    old = DistributedDataParallel(
        module, process_group=dist.new_group(), use_distributed_optimizer=True, overlap_param_gather=True
    )
    optimizer = DistributedOptimizer(torch.optim.SGD(old.parameters(), RATE), old)
    old(torch.ones(1, 700)).sum().backward()
    optimizer.step()
    del old, optimizer
    DistributedDataParallel(module, process_group=dist.new_group())
    before(torch.ones(1, 700)).sum().backward()
    for parameter, start in zip(module.parameters(), before.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), (start - RATE * start.grad).detach())
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_module_is_wrapped_with_what_its_last_step_has_made_of_it(backend):
    run_ranks(_wrap_while_gathered, 2, backend, timeout=60)
