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


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_that_were_never_stepped_are_so_after_a_checkpoint(backend: str, tmp_path: Path) -> None:
    run_ranks(_saved_and_loaded, 2, backend, timeout=90, folder=str(tmp_path))
