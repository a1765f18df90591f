"""torch's own clipping over the param groups of a DistributedOptimizer: right where these show whole gradients, else refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import utils

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import seeded
from support.processes import run_ranks

CLIP_NORM, CLIP_VALUE = utils.clip_grad_norm_, utils.clip_grad_value_  # bound before a model is wrapped
LIMIT = 0.125  # in any type
BFLOAT16: dict[str, Any] = {"dtype": torch.bfloat16}
SHARDED: dict[str, Any] = {"use_distributed_optimizer": True, "bucket_size": 100}
IN_FP32: dict[str, Any] = {"grad_reduce_in_fp32": True}


class _Plain:
    """One process, with torch's optimizer over float32 copies."""

    def __init__(self, module: torch.nn.Module, make: Any, grad_dtype: torch.dtype) -> None:
        self.module, self.grad_dtype = module, grad_dtype
        self.copies = [torch.nn.Parameter(one.detach().float().clone()) for one in module.parameters()]
        self.optimizer = make(self.copies)

    def step(self, world_size: int, step: int, clip: Callable[[Any], Any]) -> Any:
        sums = [torch.zeros_like(copy, dtype=self.grad_dtype) for copy in self.copies]
        for rank in range(world_size):
            grads = torch.autograd.grad(_loss(self.module, rank, step), list(self.module.parameters()))
            torch._foreach_add_(sums, [grad.to(self.grad_dtype) for grad in grads])
        for copy_, sum_ in zip(self.copies, sums, strict=True):
            copy_.grad = (sum_ / world_size).float()
        result = clip(self.copies)
        self.optimizer.step()
        with torch.no_grad():
            for parameter, copy_ in zip(self.module.parameters(), self.copies, strict=True):
                parameter.copy_(copy_)
        return result


def _loss(model: torch.nn.Module, rank: int, step: int) -> torch.Tensor:
    batch = torch.randn(4, 6, generator=seeded(10 * step + rank)).to(next(model.parameters()).dtype)
    return model(batch).float().square().sum()


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def _adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=0.1)


def _made(
    make: Any = _sgd, dtype: torch.dtype = torch.float32, **layout: Any
) -> tuple[DistributedDataParallel, torch.optim.Optimizer, DistributedOptimizer, _Plain]:
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(6, 40), torch.nn.Tanh(), torch.nn.Linear(40, 3)).to(dtype)
    plain = _Plain(copy.deepcopy(module), make, torch.float32 if "grad_reduce_in_fp32" in layout else dtype)
    model = DistributedDataParallel(module, **layout)
    inner = make(model.parameters())
    return model, inner, DistributedOptimizer(inner, model), plain


def _given(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _grads(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter.grad for parameter in _given(optimizer) if parameter.grad is not None]


def _name(one: Any) -> str:
    return getattr(one, "__name__", str(one))


def _check(model: DistributedDataParallel, plain: _Plain) -> None:
    for ours, theirs in zip(model.parameters(), plain.module.parameters(), strict=True):
        rtol, atol = (1e-2, 1e-4) if ours.dtype == torch.bfloat16 else (1e-5, 1e-6)
        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=atol)


def _refused(rank: int, world_size: int, layout: dict[str, Any], make: Any) -> None:
    model, inner, optimizer, plain = _made(make, **layout)
    is_sharded = "use_distributed_optimizer" in layout
    reason = "of the gradient of parameter '.*' the param groups" if is_sharded else "the gradient of parameter '.*' is"
    expected = r"expected clip_grad_norm_\(\) of farandole\.ddp\.DistributedOptimizer"
    for step in range(3):
        optimizer.zero_grad()
        _loss(model, rank, step).backward()
        for one in (optimizer, inner):
            for form in (list, iter, lambda given: given[-1]):
                for clip in (utils.clip_grad_norm_, CLIP_NORM):
                    with pytest.raises(RuntimeError, match=f"clip_grad_norm_: {reason}.*: {expected}"):
                        clip(form(_given(one)), 0.5)
                with pytest.raises(RuntimeError, match=f"clip_grad_norm_: {reason}.*: {expected}"):
                    utils.clip_grads_with_norm_(form(_given(one)), 0.5, torch.ones(()))
        with pytest.raises(RuntimeError, match=f"get_total_norm: {reason}.*: {expected}"):
            utils.get_total_norm(_grads(optimizer))
        norm = optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        want = plain.step(world_size, step, lambda copies: CLIP_NORM(copies, 0.5))
        assert norm.item() == pytest.approx(want.item(), rel=1e-2)
        _check(model, plain)
    alone = torch.nn.Linear(2, 2)  # with which it has nothing to do
    alone(torch.ones(2)).sum().backward()
    assert utils.clip_grad_norm_(alone.parameters(), 0.5) > 0.5
    assert utils.get_total_norm([one.grad for one in alone.parameters()]).item() == pytest.approx(0.5, rel=1e-4)


@pytest.mark.parametrize(
    ("layout", "make"),
    [
        (SHARDED, _sgd),
        (SHARDED | BFLOAT16, _sgd),
        (SHARDED | BFLOAT16 | IN_FP32, _sgd),
        (SHARDED, _adafactor),
        (BFLOAT16, _sgd),
    ],
    ids=_name,
)
def test_parts_of_gradients_are_not_clipped_by_their_own_norms(layout, make):
    run_ranks(_refused, 2, "farandole", layout=layout, make=make)


def _whole(rank: int, world_size: int, layout: dict[str, Any]) -> None:
    for of_inner in (False, True):
        for order in (2.0, torch.inf):
            model, inner, optimizer, plain = _made(**layout)
            for step in range(3):
                optimizer.zero_grad()
                _loss(model, rank, step).backward()
                given = inner if of_inner else optimizer
                total = utils.get_total_norm(_grads(given), order)
                norm = utils.clip_grad_norm_(_given(given), 0.5, order)
                optimizer.step()
                want = plain.step(world_size, step, lambda copies, order=order: CLIP_NORM(copies, 0.5, order))
                assert (
                    norm.item() == total.item() == pytest.approx(want.item(), rel=1e-2 if "dtype" in layout else 1e-4)
                )
                _check(model, plain)


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [(2, {}), (2, BFLOAT16 | IN_FP32), (1, SHARDED), (1, SHARDED | BFLOAT16 | IN_FP32)],
    ids=_name,
)
def test_whole_gradients_are_clipped_as_torchs_own(world_size, layout):
    run_ranks(_whole, world_size, "farandole", layout=layout)


def _values(rank: int, world_size: int, layout: dict[str, Any], make: Any) -> None:
    model, inner, optimizer, plain = _made(make, **layout)
    has_copies = "dtype" in layout and "grad_reduce_in_fp32" not in layout
    for step in range(3):
        optimizer.zero_grad()
        _loss(model, rank, step).backward()
        for one in (optimizer, inner):
            if not has_copies and (one is optimizer or make is _sgd):
                continue
            with pytest.raises(
                RuntimeError, match=r"clip_grad_value_: .*the gradient of .* expected parameter\.main_grad\.clamp_"
            ):
                utils.clip_grad_value_(_given(one), LIMIT)
        if has_copies:
            for parameter in model.parameters():
                parameter.main_grad.clamp_(-LIMIT, LIMIT)
        else:
            utils.clip_grad_value_(_given(optimizer if step or make is not _sgd else inner), LIMIT)
        optimizer.step()
        plain.step(world_size, step, lambda copies: CLIP_VALUE(copies, LIMIT))
        _check(model, plain)


@pytest.mark.parametrize(
    ("layout", "make"),
    [
        ({}, _sgd),
        (BFLOAT16, _sgd),
        (BFLOAT16 | IN_FP32, _sgd),
        (SHARDED, _sgd),
        (SHARDED | BFLOAT16, _sgd),
        (SHARDED | BFLOAT16 | IN_FP32, _sgd),
        (SHARDED, _adafactor),
    ],
    ids=_name,
)
def test_values_are_clipped_where_they_are(layout, make):
    """Which no rank needs the others for."""
    run_ranks(_values, 2, "farandole", layout=layout, make=make)
