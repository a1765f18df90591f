"""The optimizer that a DistributedOptimizer was made of: steps of its own are refused, the other's go on through it."""

from __future__ import annotations

import copy
import gc
import pickle
from typing import Any

import pytest
import torch

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import DEVICE, seeded
from support.processes import run_ranks

LAYOUTS: list[dict[str, Any]] = [
    {},
    {"dtype": torch.bfloat16, "grad_reduce_in_fp32": True},
    {"use_distributed_optimizer": True},
    {"dtype": torch.bfloat16, "use_distributed_optimizer": True},
    {"use_distributed_optimizer": True, "bucket_size": 30, "in_parts": True},
]
REFUSED = (
    r"AdamW\.step\(\): a farandole\.ddp\.DistributedOptimizer was made of this AdamW.*: expected step\(\) of the Dist"
)


def _module(dtype: torch.dtype) -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)).to(dtype)


def _made(
    dtype: torch.dtype = torch.float32, in_parts: bool = False, **layout: Any
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, DistributedOptimizer]:
    model = DistributedDataParallel(_module(dtype), **layout)
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    return model, inner, DistributedOptimizer(inner, model, overlap_param_gather_with_optimizer_step=in_parts)


def _loss(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(4, 6, generator=seeded(10 * step + rank))
    return model(inputs.to(next(model.parameters()).dtype)).float().square().sum()


def _values(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten().float() for parameter in model.parameters()])


def _refused(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    model, inner, optimizer = _made(**layout)
    for step in range(2):
        optimizer.zero_grad()
        _loss(model, rank, step).backward()
        before = _values(model)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
        scaler.scale(torch.ones(()))
        for use in (inner.step, lambda: inner.step(lambda: torch.ones(())), lambda scaler=scaler: scaler.step(inner)):
            with pytest.raises(RuntimeError, match=REFUSED):
                use()
        assert torch.equal(_values(model), before)
        optimizer.step()
        assert not torch.equal(_values(model), before)
        with pytest.raises(RuntimeError, match=REFUSED):
            inner.step()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_step_of_its_own_is_refused(layout):
    run_ranks(_refused, 2, "farandole", layout=layout)


def _goes_on(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    """With a scheduler that wraps its step(), with hooks and with state that is made by a step, as torch's in one process."""
    model, inner, optimizer = _made(**layout)
    plain = _module(torch.float32)
    own = torch.optim.AdamW(plain.parameters(), lr=0.1)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (inner, own)]
    calls: list[int] = []
    inner.register_step_pre_hook(lambda *_: calls.append(1))
    optimizer.load_state_dict(optimizer.state_dict())
    calls.clear()
    for step in range(3):
        optimizer.zero_grad()
        own.zero_grad()
        _loss(model, rank, step).backward()
        (sum(_loss(plain, other, step) for other in range(world_size)) / world_size).backward()
        optimizer.step()
        own.step()
        for scheduler in schedulers:
            scheduler.step()
    assert len(calls) >= 3
    is_short = "dtype" in layout
    torch.testing.assert_close(
        _values(model), _values(plain), rtol=5e-2 if is_short else 1e-4, atol=5e-2 if is_short else 1e-5
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_others_steps_go_through_it(layout):
    run_ranks(_goes_on, 2, "farandole", layout=layout)


def _others(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    model, inner, optimizer = _made(**layout)
    _loss(model, rank, 0).backward()
    optimizer.step()
    before = _values(model)
    for copied in (copy.deepcopy(inner), pickle.loads(pickle.dumps(inner))):
        for parameter in copied.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        values = [parameter.detach().clone() for parameter in copied.param_groups[0]["params"]]
        copied.step()
        for parameter, value in zip(copied.param_groups[0]["params"], values, strict=True):
            assert not torch.equal(parameter, value)
    assert torch.equal(_values(model), before)  # they are copies
    alone = torch.nn.Linear(2, 2)
    plain = torch.optim.AdamW(alone.parameters())
    alone(torch.ones(2)).sum().backward()
    plain.step()
    with pytest.raises(RuntimeError, match=REFUSED):
        inner.step()
    del optimizer
    gc.collect()
    inner.step()


@pytest.mark.parametrize("layout", LAYOUTS[:4], ids=str)
def test_copies_of_it_are_their_own_and_so_is_what_nobody_holds_any_more(layout):
    run_ranks(_others, 2, "farandole", layout=layout)
