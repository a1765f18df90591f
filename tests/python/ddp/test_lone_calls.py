"""Calls that all ranks have to make, made by one alone: what waits says so, and the error names the call."""

from __future__ import annotations

import datetime
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import only_on_cpu
from support.processes import await_all, run_ranks

pytestmark = only_on_cpu("a wait for a device does not end by itself")


def _module() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))


def _evaluates(rank: int, world_size: int) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=8))
    model = DistributedDataParallel(_module(), process_group=group)
    model(torch.randn(6, 4)).sum().backward()
    model.eval()
    with torch.no_grad():
        expected = model.module(torch.ones(2, 4))
        if rank == 1:
            begin = time.monotonic()
            with (
                warnings.catch_warnings(record=True) as caught,
                pytest.raises(RuntimeError, match=r"buffers of rank 0 .* by model\.module\. It failed: "),
            ):
                warnings.simplefilter("always")
                model(torch.ones(2, 4))
            assert 5 < time.monotonic() - begin < 40
            told = [str(one.message) for one in caught if "has waited for 5 s; it waits on" in str(one.message)]
            assert len(told) == 1 and "what one rank alone evaluates it calls by model.module" in told[0]
            torch.testing.assert_close(model.module(torch.ones(2, 4)), expected)
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_evaluates_alone_by_the_wrapper_is_told_how(backend):
    run_ranks(_evaluates, 2, backend, timeout=60)


CALLS: dict[str, Callable[[Any], Any]] = {
    "clip_grad_norm_": lambda optimizer: optimizer.clip_grad_norm_(1.0),
    "grad_norm": lambda optimizer: optimizer.grad_norm(),
    "count_zeros": lambda optimizer: optimizer.count_zeros(),
    "full_state_dict": lambda optimizer: optimizer.full_state_dict(),
}


def _measures(rank: int, world_size: int, call: str) -> None:
    group = dist.new_group(timeout=datetime.timedelta(seconds=3))
    model = DistributedDataParallel(_module(), process_group=group, use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(6, 4)).sum().backward()
        CALLS[call](optimizer)
        optimizer.step()
    optimizer.zero_grad()
    model(torch.randn(6, 4)).sum().backward()
    if rank == 0:
        with pytest.raises(
            (RuntimeError, ValueError), match=rf"{re.escape(call)}\(\).* collectives?: expected the call on"
        ):
            CALLS[call](optimizer)
    await_all(rank, world_size)


@pytest.mark.sample(3)
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_measures_or_saves_alone_is_told_that_all_have_to(backend, call):
    run_ranks(_measures, 2, backend, timeout=60, call=call)


def _together(rank: int, world_size: int) -> None:
    """No word of it where all call it, or where no gradients are given up."""
    model = DistributedDataParallel(_module())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model(torch.randn(6, 4)).sum().backward()
            with torch.no_grad():
                for _ in range(3):
                    model(torch.randn(6, 4))
    await_all(rank, world_size)


def test_evaluations_of_all_ranks_go_on_as_ever():
    run_ranks(_together, 2, BACKENDS[-1], timeout=60)
