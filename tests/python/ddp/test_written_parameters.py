"""Parameters that the program itself writes between steps: what it wrote counts, and replicas stay alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.swa_utils import AveragedModel

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import DEVICE, seeded
from support.processes import run_ranks

LAYOUTS: list[dict[str, Any]] = [
    {"grad_reduce_in_fp32": True},
    {"use_distributed_optimizer": True},
    {"use_distributed_optimizer": True, "bucket_size": 20},
    {"use_distributed_optimizer": True, "bucket_size": 20, "overlap_param_gather": True},
]


def _module(seed: int = 3) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).bfloat16()


def _step(model: Any, optimizer: Any, rank: int) -> None:
    optimizer.zero_grad()
    inputs = torch.randn(4, 6, generator=seeded(rank)).bfloat16()
    model(inputs).float().square().sum().backward()
    optimizer.step()


def _load(model: Any) -> None:
    model.module.load_state_dict(_module(5).state_dict())


def _load_through_the_wrapper(model: Any) -> None:
    model.load_state_dict({f"module.{name}": value for name, value in _module(5).state_dict().items()})


@torch.no_grad()
def _normalize(model: Any) -> None:
    weight = model.get_parameter("module.2.weight")
    weight.copy_(torch.nn.functional.normalize(weight, dim=1))


@torch.no_grad()
def _clamp(model: Any) -> None:
    for parameter in model.parameters():
        parameter.clamp_(-0.125, 0.125)


def _in_16_bits(rank: int, world_size: int, layout: dict[str, Any], write: Callable[[Any], None], parts: bool) -> None:
    kwargs = {"overlap_param_gather_with_optimizer_step": True} if parts else {}
    trained = []
    for writes in (True, False):
        model = DistributedDataParallel(_module(), **layout)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-2), model, **kwargs)
        _step(model, optimizer, rank)
        for group in optimizer.param_groups:
            group["lr"] = 1e-6  # which no parameter of 16 bits shows
        for _ in range(3):
            _step(model, optimizer, rank)
        if "use_distributed_optimizer" in layout:
            model.start_param_sync(force_sync=True)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        copies = [run.tensor.detach().clone() for run in optimizer._runs]
        if writes:
            write(model)
        written = [parameter.detach().clone() for parameter in model.parameters()]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        state = optimizer.state_dict()["state"]
        for run in optimizer._runs:
            for piece in run.pieces:
                part = state[piece.name]["param"]
                value = dict(model.module.named_parameters())[piece.name].detach().reshape(-1)
                value = value[piece.begin : piece.begin + piece.numel]
                assert torch.equal(torch.as_tensor(part).to(torch.bfloat16).reshape(-1), value), piece.name
        _step(model, optimizer, rank)
        for parameter, value in zip(model.parameters(), written, strict=True):
            assert torch.equal(parameter.detach(), value)
        trained.append((before, written, copies, [run.tensor.detach().clone() for run in optimizer._runs], optimizer))
    (before, written, *_), (unwritten, *_) = trained
    assert all(torch.equal(one, other) for one, other in zip(before, unwritten, strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(before, written, strict=True))
    # What was not written, or not changed, keeps its digits.
    _, _, copies, after, optimizer = trained[0]
    for run, one, other in zip(optimizer._runs, copies, after, strict=True):
        same = one.bfloat16() == other.bfloat16()
        assert torch.equal(one[same], other[same]), run.pieces[0].name


@pytest.mark.parametrize("write", [_load, _load_through_the_wrapper, _normalize, _clamp], ids=lambda one: one.__name__)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_float32_copies_follow_what_was_written(layout, write):
    run_ranks(_in_16_bits, 2, "farandole", layout=layout, write=write, parts=False)


def test_float32_copies_follow_what_was_written_between_steps_in_parts():
    run_ranks(_in_16_bits, 2, "farandole", layout=LAYOUTS[-1], write=_clamp, parts=True)


def _between(rank: int, world_size: int, use: str) -> None:
    """With the gathers of the step before under way, and without."""
    results = []
    for overlaps in (False, True):
        model = DistributedDataParallel(
            _module().float(),
            use_distributed_optimizer=True,
            bucket_size=20,
            overlap_param_gather=overlaps,
        )
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        averaged = AveragedModel(model.module)
        losses = []
        for step in range(4):
            optimizer.zero_grad()
            loss = model(torch.randn(4, 6, generator=seeded(10 * step + rank))).square().sum()
            if use == "read":
                loss = loss + sum(parameter.exp().sum() for parameter in model.parameters())
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            if use == "average":
                averaged.update_parameters(model)
            elif use == "write":
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.clamp_(-0.2, 0.2)
            elif use == "call":
                values = dict(model.named_parameters())
                output = torch.func.functional_call(model, values, torch.ones(2, 6, device=DEVICE))
                losses.append(output.sum().item())
        model.start_param_sync(force_sync=True)
        of = averaged if use == "average" else model
        results.append((losses, [parameter.detach().clone() for parameter in of.parameters()]))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(one, other) for one, other in zip(results[0][1], results[1][1], strict=True))


@pytest.mark.parametrize("use", ["read", "write", "average", "call"])
def test_the_wrappers_parameters_are_there_when_they_are_asked_for(use):
    run_ranks(_between, 2, "farandole", use=use)


def _still_under_way(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(_module(), use_distributed_optimizer=True, overlap_param_gather=True)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(2):
        _step(model, optimizer, rank)
    model.zero_grad()
    optimizer.zero_grad()
    model.train()
    assert not model._param_sync._gather.is_current
    next(model.parameters())
    assert model._param_sync._gather.is_current


def test_what_begins_a_step_does_not_wait_for_parameters():
    run_ranks(_still_under_way, 2, "farandole")
