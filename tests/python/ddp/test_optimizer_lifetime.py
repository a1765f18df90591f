"""When a distributed optimizer begins and ends: state that was saved before its first step, and what it leaves behind."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import seeded
from support.processes import run_ranks

OPTIONS: list[dict[str, Any]] = [{}, {"grad_reduce_in_fp32": True}, {"use_distributed_optimizer": True}]


def _make(make: Any, **options: Any) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    torch.manual_seed(1)
    model = DistributedDataParallel(nn.Linear(3, 2), **options)
    return model, DistributedOptimizer(make(model.parameters()), model)


def _step(model: Any, optimizer: Any, number: int) -> None:
    optimizer.zero_grad()
    batch = torch.randn(4, 3, generator=seeded(number))
    model(batch).square().sum().backward()
    optimizer.step()


def _free(rank: int, world_size: int) -> None:
    for options in OPTIONS:
        for steps in (0, 2):
            model, optimizer = _make(torch.optim.Adam, **options)
            for number in range(steps):
                _step(model, optimizer, number)
            gone = [weakref.ref(one) for one in (model, model.module, optimizer)]
            del model, optimizer
            gc.collect()
            assert [one() for one in gone] == [None] * 3, (options, steps)


def test_nothing_is_left_of_an_optimizer_that_nobody_has():
    run_ranks(_free, 1, "farandole")


def _copy(rank: int, world_size: int) -> None:
    _, optimizer = _make(torch.optim.Adam)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(NotImplementedError, match="cannot be copied or pickled: make another one"):
            attempt(optimizer)


def test_a_copy_is_refused():
    run_ranks(_copy, 1, "farandole")


OPTIMIZERS: list[Any] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=0.3),
    lambda parameters: torch.optim.Adam(parameters, lr=0.1, weight_decay=0.3),
    lambda parameters: torch.optim.NAdam(parameters, lr=0.1),
    lambda parameters: torch.optim.Rprop(parameters, lr=0.1),
    lambda parameters: torch.optim.ASGD(parameters, lr=0.1),
    lambda parameters: torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.2),
]


def _load_the_beginning(rank: int, world_size: int) -> None:
    for make in OPTIMIZERS:
        for options in OPTIONS:
            model, optimizer = _make(make, **options)
            saved = copy.deepcopy(optimizer.full_state_dict())
            loaded_model, loaded = _make(make, **options)
            _step(loaded_model, loaded, 9)  # state of its own, which loading takes away
            loaded_model.module.load_state_dict(model.module.state_dict())
            loaded.load_state_dict(saved)
            torch.manual_seed(1)
            plain = nn.Linear(3, 2)
            plain_optimizer = make(plain.parameters())
            for number in range(3):
                _step(model, optimizer, number)
                _step(loaded_model, loaded, number)
                _step(plain, plain_optimizer, number)
            name = f"{type(plain_optimizer).__name__}, {options}"
            for one in (model, loaded_model):
                for ours, theirs in zip(one.module.parameters(), plain.parameters(), strict=True):
                    assert torch.allclose(ours, theirs, atol=1e-6), name
            again = optimizer.full_state_dict()
            assert [group["has_stepped"] for group in again["param_groups"]] == [True]


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_was_saved_before_the_first_step_is_a_beginning(world_size: int) -> None:
    run_ranks(_load_the_beginning, world_size, "farandole")


class _Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def _skip(rank: int, world_size: int) -> None:
    for wrapper in (nn.parallel.DistributedDataParallel, DistributedDataParallel):
        torch.manual_seed(1)
        model = wrapper(_Halves(), find_unused_parameters=True)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        if wrapper is DistributedDataParallel:
            optimizer = DistributedOptimizer(optimizer, model)
        before = copy.deepcopy(model.module.unused.state_dict())
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 3)).sum().backward()
            if wrapper is DistributedDataParallel:
                assert optimizer.clip_grad_norm_(1.0) > 0
            optimizer.step()
            torch.testing.assert_close(model.module.unused.state_dict(), before, rtol=0, atol=0)
        assert not torch.equal(model.module.used.weight, model.module.unused.weight)


def test_what_no_rank_has_used_is_left_alone_where_nothing_is_sharded():
    run_ranks(_skip, 2, "farandole")
