"""float32 copies of parameters are taken from the model, or from a state_dict that has more digits."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from ddp_models import BACKENDS

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import seeded
from support.processes import await_all, run_ranks


def _module() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3), torch.nn.LayerNorm(3)).bfloat16()


def _optimizer(count: int, sharded: bool, whole: bool) -> tuple[list[DistributedDataParallel], DistributedOptimizer]:
    models = [DistributedDataParallel(_module(), use_distributed_optimizer=sharded) for _ in range(count)]
    adam = torch.optim.Adam([parameter for model in models for parameter in model.parameters()])
    return models, DistributedOptimizer(adam, models, is_elementwise=not whole)


def _values(seed: int) -> dict[str, torch.Tensor]:
    generator = seeded(seed)
    return {name: torch.randn(value.shape, generator=generator) for name, value in _module().state_dict().items()}


def _forms(values: list[dict[str, torch.Tensor]]) -> list[dict[str, Any]]:
    """As Megatron-core's checkpoints may have them."""
    longer = [{f"module.{name}": value.double() for name, value in chunk.items()} for chunk in values]
    if len(values) == 1:
        return [values[0], {"model": values[0], "iteration": 3}, {"model0": longer[0]}, longer[0]]
    return [{f"model{index}": chunk for index, chunk in enumerate(each)} for each in (values, longer)] + [
        {f"model_{index}": chunk for index, chunk in enumerate(values)}
    ]


def _copies(rank: int, world_size: int) -> None:
    for count, (sharded, whole) in itertools.product((1, 2), ((False, False), (True, False), (True, True))):
        models, optimizer = _optimizer(count, sharded, whole)
        values = [_values(seed) for seed in range(count)]
        for model, chunk in zip(models, values, strict=True):
            model.module.load_state_dict(chunk)
        for form in [None, *_forms(values)]:
            optimizer.reload_model_params()  # what the form before gave is gone
            optimizer.reload_model_params(state_dict=form)
            got = optimizer.full_state_dict()["state"]
            for index, chunk in enumerate(values):
                for name, value in chunk.items():
                    want = value.bfloat16().float() if form is None else value
                    name = name if count == 1 else f"{index}.{name}"
                    assert torch.equal(got[name]["param"].cpu(), want.flatten().cpu()), (count, sharded, whole, name)
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_copies_are_those_of_the_model_or_of_the_state_dict(backend):
    run_ranks(_copies, 2, backend, timeout=60)


def _refused(rank: int, world_size: int) -> None:
    _, optimizer = _optimizer(1, True, False)
    before = optimizer.full_state_dict()["state"]["0.weight"]["param"].clone()
    values = _values(1)
    for change, message in (
        ({"1.bias": None}, r"state_dict has nothing for parameter '1.bias': expected one tensor"),
        ({"1.bias": None, "a.1.bias": values["1.bias"], "b.1.bias": values["1.bias"]}, r"a\.1\.bias.*b\.1\.bias"),
        ({"1.bias": torch.zeros(4)}, r"state_dict\['1.bias'\] is \(4,\): expected a tensor of \(3,\)"),
        ({"1.bias": "text"}, r"state_dict\['1.bias'\] is str: expected a tensor of \(3,\)"),
    ):
        changed = {name: value for name, value in {**values, **change}.items() if value is not None}
        with pytest.raises(ValueError, match=message):
            optimizer.reload_model_params(changed)
    assert torch.equal(optimizer.full_state_dict()["state"]["0.weight"]["param"], before)
    _, optimizer = _optimizer(2, True, False)
    with pytest.raises(ValueError, match=r"state_dict has no 'model1': expected \['model0', 'model1'\]"):
        optimizer.reload_model_params({"model0": values})
    with pytest.raises(ValueError, match="expected 'model0' to 'model1'"):
        optimizer.reload_model_params(values)


def test_a_state_dict_that_lacks_a_parameter_changes_nothing():
    run_ranks(_refused, 1, "gloo")
