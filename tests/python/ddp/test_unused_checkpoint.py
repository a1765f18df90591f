"""Checkpoints of an optimizer of which some parameters were never stepped, loaded by one that has stepped others."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from ddp_models import BACKENDS

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.processes import run_ranks

# Which steps use the other branch, before saving and before loading.
_STEPS = [([False], []), ([False], [True]), ([True], [False]), ([True], []), ([False], [False]), ([], [True]), ([], [])]
_MAKERS: dict[str, Callable[[Iterable[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "Adam": torch.optim.Adam,
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, dampening=0.5),
    "SGD without state": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "Adagrad": torch.optim.Adagrad,
}


class _Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.one, self.other = torch.nn.Linear(40, 4), torch.nn.Linear(40, 4)
        self.register_buffer("batch", torch.randn(6, 40))

    def forward(self, uses_other: bool) -> torch.Tensor:
        return (self.one(self.batch) + (self.other(self.batch) if uses_other else 0)).square().mean()


def _train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: list[bool]) -> None:
    for uses_other in steps:
        optimizer.zero_grad()
        model(uses_other).backward()
        optimizer.step()


def _saved_and_loaded(rank: int, world_size: int, folder: str) -> None:
    for number, (saving, loading) in enumerate(_STEPS):
        for name, make in _MAKERS.items():
            where = f"{name}, {saving} saved, {loading} before loading, rank {rank}"
            path = f"{folder}/{number} {name}"
            model = DistributedDataParallel(_Branches(), unused_parameters="skip")
            optimizer = DistributedOptimizer(make(model.parameters()), model)
            plain = _Branches()
            plain_optimizer = make(plain.parameters())
            _train(model, optimizer, saving)
            _train(plain, plain_optimizer, saving)
            dcp.save({"model": model.module, "optimizer": optimizer}, checkpoint_id=path)

            loaded = DistributedDataParallel(_Branches(), unused_parameters="skip")
            loaded_optimizer = DistributedOptimizer(make(loaded.parameters()), loaded)
            _train(loaded, loaded_optimizer, loading)
            dcp.load({"model": loaded.module, "optimizer": loaded_optimizer}, checkpoint_id=path)
            expected = _Branches()
            expected_optimizer = make(expected.parameters())
            expected.load_state_dict(plain.state_dict())
            expected_optimizer.load_state_dict(copy.deepcopy(plain_optimizer.state_dict()))
            # What is saved goes on as if it had not been.
            for ours, our_optimizer in ((loaded, loaded_optimizer), (model, optimizer)):
                _train(ours, our_optimizer, [False, True, True])
            _train(expected, expected_optimizer, [False, True, True])
            for ours in (loaded, model):
                for got, want in zip(ours.parameters(), expected.parameters(), strict=True):
                    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-7, msg=where)


_KINDS = [{}, {"unused_parameters": "skip"}, {"use_distributed_optimizer": True}, {"grad_reduce_in_fp32": True}]


def _of_any_kind(rank: int, world_size: int, folder: str) -> None:
    for number, saving in enumerate(_KINDS):
        for other, loading in enumerate(_KINDS):
            values = []
            for kind in (saving, loading):
                model = DistributedDataParallel(_Branches(), **kind)
                optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
                both = {"model": model.module, "optimizer": optimizer}
                if not values:
                    _train(model, optimizer, [True, True])
                    dcp.save(both, checkpoint_id=f"{folder}/{number} {other}")
                else:
                    dcp.load(both, checkpoint_id=f"{folder}/{number} {other}")
                _train(model, optimizer, [True])
                values.append([parameter.detach() for parameter in model.module.parameters()])
            for ours, theirs in zip(*values, strict=True):
                torch.testing.assert_close(theirs, ours, msg=f"{saving} saved, {loading} loads, rank {rank}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_wrappers_of_any_kind_load_what_those_of_another_have_saved(backend: str, tmp_path: Path) -> None:
    run_ranks(_of_any_kind, 2, backend, timeout=90, folder=str(tmp_path))


def _saved_often(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(_Branches(), unused_parameters="skip")
    for make in _MAKERS.values():
        plain = make(model.parameters())
        optimizer = DistributedOptimizer(plain, model)
        _train(model, optimizer, [False])
        steps: list[int] = []
        plain.register_step_post_hook(lambda *_, steps=steps: steps.append(1))
        states = [optimizer.state_dict() for _ in range(3)]
        assert len(steps) <= 1  # to make what is lacking, once
        for state in states:
            assert state["state"]["other.weight"].keys() == state["state"]["one.weight"].keys()


def test_state_that_is_lacking_is_made_once() -> None:
    run_ranks(_saved_often, 2, "gloo")


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_that_were_never_stepped_are_so_after_a_checkpoint(backend: str, tmp_path: Path) -> None:
    run_ranks(_saved_and_loaded, 2, backend, timeout=90, folder=str(tmp_path))
