"""What a class or a program has settled about an optimizer's settings holds after another one's state was loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ddp_models import BACKENDS

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import seeded
from support.processes import run_ranks

OPTIONS: list[dict[str, Any]] = [
    {},
    {"use_distributed_optimizer": True, "bucket_size": 20},
    {"use_distributed_optimizer": True, "overlap_param_gather": True, "bucket_size": 20},
]
WAYS = ["state_dict", "full_state_dict", "torch.distributed.checkpoint"]
Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


def _module() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Tanh(), torch.nn.Linear(9, 4))


def _groups(module: torch.nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in module.parameters() if (p.dim() > 1) == matrices]} for matrices in (True, False)]


class _Both:
    """A wrapped model and the same one in one process."""

    def __init__(self, make: Make, options: dict[str, Any], rank: int, world_size: int) -> None:
        self.options, self.rank, self.world_size = options, rank, world_size
        self.model, self.plain = DistributedDataParallel(_module(), **options), _module()
        self.optimizer = DistributedOptimizer(make(_groups(self.model.module)), self.model)
        self.expected = make(_groups(self.plain))

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.expected.zero_grad()
        batches = [torch.randn(5, 6, generator=seeded(10 * number + one)) for one in range(self.world_size)]
        self.model(batches[self.rank]).square().mean().backward()
        sum(self.plain(batch).square().mean() / self.world_size for batch in batches).backward()
        self.optimizer.step()
        self.expected.step()

    def go_on(self, make: Make, way: str, path: str) -> None:
        """With an optimizer of another making, over a model of its own."""
        before, other = self.optimizer, make(_groups(self.plain))
        other.load_state_dict(copy.deepcopy(self.expected.state_dict()))
        self.expected = other
        values = copy.deepcopy(self.model.module.state_dict())
        self.model = DistributedDataParallel(_module(), **self.options)
        self.model.module.load_state_dict(values)
        self.optimizer = DistributedOptimizer(make(_groups(self.model.module)), self.model)
        if way == "torch.distributed.checkpoint":
            dcp.save({"optimizer": before}, checkpoint_id=path)
            dcp.load({"optimizer": self.optimizer}, checkpoint_id=path)
        else:
            self.optimizer.load_state_dict(copy.deepcopy(getattr(before, way)()))

    def check(self, where: str) -> None:
        for (name, want), got in zip(self.plain.named_parameters(), self.model.parameters(), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6, msg=f"{where} {name}")


def _with_shared_rate(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    rate = torch.tensor(0.01)
    return torch.optim.AdamW([group | {"lr": rate} for group in groups])


def _share(rank: int, world_size: int, path: str) -> None:
    for number, options in enumerate(OPTIONS):
        for way in WAYS:
            both = _Both(_with_shared_rate, options, rank, world_size)
            both.step(0)
            both.go_on(_with_shared_rate, way, f"{path}/{number}")
            both.step(1)
            for one in (both.optimizer, both.expected):
                one.param_groups[0]["lr"].fill_(0.1)
            both.step(2)
            both.check(f"{options} {way}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_param_groups_that_share_a_rate_share_it_after_loading(backend, tmp_path):
    run_ranks(_share, 2, backend, timeout=60, path=str(tmp_path))


def _go_on_from_adam(rank: int, world_size: int, path: str) -> None:
    kinds = [torch.optim.Adam, torch.optim.AdamW]
    for number, options in enumerate(OPTIONS):
        for first, second in (kinds, kinds[::-1]):
            for way in WAYS:
                both = _Both(partial(first, lr=0.01, weight_decay=0.5), options, rank, world_size)
                for step in range(2):
                    both.step(step)
                both.go_on(partial(second, lr=0.01, weight_decay=0.5), way, f"{path}/{number}{first.__name__}")
                for step in range(2, 5):
                    both.step(step)
                both.check(f"{options} {way} {second.__name__}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_kind_of_decay_that_is_the_classs_own_is_not_loaded_from_another(backend, tmp_path):
    run_ranks(_go_on_from_adam, 2, backend, timeout=60, path=str(tmp_path))


def _refuse(rank: int, world_size: int) -> None:
    for options in OPTIONS:
        saved = _Both(lambda groups: torch.optim.Adam(groups, lr=0.01), options, rank, world_size)
        saved.step(0)
        both = _Both(lambda groups: torch.optim.SGD(groups, lr=0.1), options, rank, world_size)
        state = saved.optimizer.full_state_dict()
        with pytest.raises(
            ValueError, match=r"has 'exp_avg' of parameter '[\w.]+', which this optimizer does not make"
        ):
            both.optimizer.load_state_dict(state)
        both.step(0)
        both.check(str(options))


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_that_an_optimizer_without_any_cannot_have_is_refused_by_name(backend):
    run_ranks(_refuse, 2, backend, timeout=60)
