"""What is done to gradients between backward and step counts, wherever they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import DEVICE
from support.processes import run_ranks


def _pair(dtype: torch.dtype, **options: Any) -> tuple[DistributedDataParallel, DistributedOptimizer, torch.Tensor]:
    module = torch.nn.Linear(4, 4, bias=False, dtype=dtype)
    torch.nn.init.zeros_(module.weight)
    model = DistributedDataParallel(module, **options)
    return model, DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model), module.weight


def _backward(model: DistributedDataParallel, weight: torch.Tensor) -> None:
    """The gradient of each element is one."""
    model(torch.ones(1, 4, dtype=weight.dtype)).sum().backward()


def _scaled(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for sharded in (False, True):
            model, optimizer, weight = _pair(dtype, use_distributed_optimizer=sharded)
            for step in range(2):
                optimizer.zero_grad()
                _backward(model, weight)
                assert optimizer.grad_norm().item() == 4
                model.scale_gradients(0.5)
                assert optimizer.grad_norm().item() == 2, (dtype, sharded, step)
                optimizer.step()
                if sharded:
                    model.start_param_sync(force_sync=True)
                assert weight.eq(-0.5 * (step + 1)).all(), (dtype, sharded, step)


def test_gradients_that_are_scaled_after_they_were_measured_are_scaled():
    run_ranks(_scaled, 2, "gloo", timeout=60)


def _replaced(rank: int, world_size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for scaler in (None, torch.amp.GradScaler(DEVICE, init_scale=4.0)):
            model, optimizer, weight = _pair(dtype)
            for step in range(2):
                optimizer.zero_grad()
                loss = model(torch.ones(1, 4, dtype=dtype)).sum()
                (loss if scaler is None else scaler.scale(loss)).backward()
                weight.grad = weight.grad * 0.5
                if scaler is not None:
                    scaler.unscale_(optimizer)
                assert optimizer.grad_norm().item() == 2, (dtype, scaler, step)
                optimizer.step() if scaler is None else scaler.step(optimizer)
                if scaler is not None:
                    scaler.update()
                assert weight.eq(-0.5 * (step + 1)).all(), (dtype, scaler, step)


def test_a_gradient_that_was_replaced_after_backward_is_what_the_optimizer_takes():
    run_ranks(_replaced, 2, "gloo", timeout=60)


def _zeroed(rank: int, world_size: int, options: dict[str, bool]) -> None:
    model, optimizer, weight = _pair(torch.bfloat16, **options)
    for step in range(4):
        model.zero_grad(set_to_none=step % 2 == 0)
        _backward(model, weight)
        optimizer.step()
    if model._options.is_sharded:
        model.start_param_sync(force_sync=True)
    assert weight.eq(-4).all(), weight


@pytest.mark.parametrize("options", [{}, {"grad_reduce_in_fp32": True}, {"use_distributed_optimizer": True}], ids=str)
def test_the_modules_own_zero_grad_begins_a_step(options):
    """As with torch's, though the gradients are in main_grad."""
    run_ranks(_zeroed, 2, "gloo", timeout=60, options=options)
