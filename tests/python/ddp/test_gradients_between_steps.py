"""What is done to gradients between backward and step counts, wherever they are."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import DEVICE, seeded
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


# Of gradients that are 8, after which each element of the model should have lost a half.
CHANGES: dict[str, Any] = {
    "main_grad": lambda weight: weight.main_grad.clamp_(-0.5, 0.5),
    "norm": lambda weight: torch.nn.utils.clip_grad_norm_([weight], 2.0),
    "value": lambda weight: torch.nn.utils.clip_grad_value_([weight], 0.5),
    "another": lambda weight: setattr(weight, "grad", torch.full_like(weight, 0.5)),
    "none": lambda weight: setattr(weight, "grad", None),
}


def _changed(rank: int, world_size: int) -> None:
    layouts = [{}, {"grad_reduce_in_fp32": True}, {"use_distributed_optimizer": True}]
    before = ["nothing", "grad_norm", "clip", "unscale"]
    for dtype, options, after, change in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16), layouts, before, CHANGES
    ):
        if options and change != "main_grad":
            continue  # there is no .grad
        model, optimizer, weight = _pair(dtype, **options)
        scaler = torch.amp.GradScaler(DEVICE, init_scale=4.0)
        optimizer.zero_grad()
        loss = model(torch.full((1, 4), 8.0, dtype=dtype)).sum()
        (scaler.scale(loss) if after == "unscale" else loss).backward()
        if after == "grad_norm":
            optimizer.grad_norm()
        elif after == "clip":
            optimizer.clip_grad_norm_(1e9)
        elif after == "unscale":
            scaler.unscale_(optimizer)
        CHANGES[change](weight)
        scaler.step(optimizer) if after == "unscale" else optimizer.step()
        if options.get("use_distributed_optimizer"):
            model.start_param_sync(force_sync=True)
        want = 0.0 if change == "none" else -0.5
        assert torch.allclose(weight.float(), torch.tensor(want)), (dtype, options, after, change, weight)


def test_what_is_done_to_gradients_that_were_measured_clipped_or_unscaled_counts():
    run_ranks(_changed, 2, "gloo", timeout=60)


def _clipped_twice(rank: int, world_size: int) -> None:
    """What a copy of float32 was scaled by, its gradients were, too: for who reads them, and for another step."""
    for dtype, options, whole in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16),
        ({}, {"grad_reduce_in_fp32": True}, {"use_distributed_optimizer": True}),
        (False, True),
    ):
        where = (dtype, options, whole)
        module = torch.nn.Linear(4, 4, bias=False, dtype=dtype)
        torch.nn.init.zeros_(module.weight)
        model = DistributedDataParallel(module, **options)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = DistributedOptimizer(inner, model, is_elementwise=not whole)
        optimizer.zero_grad()
        _backward(model, module.weight)
        optimizer.clip_grad_norm_(2.0)
        mine = module.weight.main_grad
        if "use_distributed_optimizer" in options:  # a part, and padding
            (bucket,) = model._reducer.buckets()
            mine = bucket.grads.chunk(world_size)[rank]
        assert torch.allclose(mine[mine != 0].float(), torch.tensor(0.5)), where
        assert optimizer.grad_norm().item() == pytest.approx(2.0, rel=1e-2), where
        optimizer.step()
        assert optimizer.grad_norm().item() == pytest.approx(2.0, rel=1e-2), where
        optimizer.step()
        model.start_param_sync(force_sync=True) if "use_distributed_optimizer" in options else None
        assert torch.allclose(module.weight.float(), torch.tensor(-1.0), atol=1e-2), (*where, module.weight)


def test_clipped_gradients_stay_clipped():
    run_ranks(_clipped_twice, 2, "gloo", timeout=60)


def _digits(rank: int, world_size: int) -> None:
    """Of what was clipped, one element is written to: the others keep the digits that the copy has."""
    model, optimizer, weight = _pair(torch.bfloat16)
    optimizer.zero_grad()
    _backward(model, weight)
    optimizer.clip_grad_norm_(1.2)
    with torch.no_grad():
        weight.grad[0, 0] = 0.25
    optimizer.step()
    copy = optimizer.state_dict()["state"]["weight"]["param"].view(4, 4)
    want = torch.full((4, 4), -0.3)
    want[0, 0] = -0.25
    torch.testing.assert_close(copy.detach(), want, rtol=1e-6, atol=0)


def test_a_write_to_clipped_gradients_leaves_the_others_all_their_digits():
    run_ranks(_digits, 2, "gloo", timeout=60)


def _zero(rank: int, world_size: int) -> None:
    """In place what was in ``.grad`` before the model was wrapped, and what was put there since."""
    for options in ({}, {"grad_reduce_in_fp32": True}, {"use_distributed_optimizer": True}):
        torch.manual_seed(4)
        module = torch.nn.Linear(6, 4)
        plain = copy.deepcopy(module)
        inputs = [torch.randn(3, 6, generator=seeded(other)) for other in range(world_size)]
        module(inputs[rank]).square().mean().backward()
        model = DistributedDataParallel(module, **options)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
        expected = torch.optim.SGD(plain.parameters(), lr=0.5)
        for step in range(3):
            if step == 1:
                module.weight.grad = torch.ones_like(module.weight)
            optimizer.zero_grad(set_to_none=False)
            expected.zero_grad()
            model(inputs[rank]).square().mean().backward()
            sum(plain(one).square().mean() / world_size for one in inputs).backward()
            optimizer.step()
            expected.step()
            for value, want in zip(module.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-6, msg=f"step {step} {options}")


def test_what_a_step_zeroes_counts_no_more_wherever_it_is():
    run_ranks(_zero, 2, "gloo", timeout=60)
