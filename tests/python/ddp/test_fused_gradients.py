"""Kernels that add gradients to main_grad themselves, as Megatron's and TransformerEngine's do."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ddp_models import BACKENDS

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import seeded
from support.processes import run_ranks


class _FusedProduct(torch.autograd.Function):
    """What such a kernel does: the gradient goes to main_grad, and what autograd gets is no gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        weight.main_grad.add_(grad.t() @ x)
        weight.grad_added_to_main_grad = True
        if getattr(weight, "zero_out_wgrad", False):
            return grad @ weight, torch.zeros_like(weight)
        return grad @ weight, torch.full_like(weight, 1e6)


class Fused(torch.nn.Module):
    def __init__(self, flag: str | None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.plain = torch.nn.Linear(6, 6)
        self.weight = torch.nn.Parameter(torch.randn(6, 6))
        if flag == "grad_added_to_main_grad":
            self.weight.grad_added_to_main_grad = False
        elif flag is not None:
            setattr(self, flag, True)

    def forward(self, x: torch.Tensor, is_fused: bool = True) -> torch.Tensor:
        x = self.plain(x)
        return (_FusedProduct.apply(x, self.weight) if is_fused else x @ self.weight.t()).square().mean()


def _input(*seed: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=seeded(hash(seed)))


# How it can be known before the first backward: Megatron's layers, TransformerEngine's, whoever marks the parameter.
FLAGS = ["gradient_accumulation_fusion", "fuse_wgrad_accumulation", "grad_added_to_main_grad"]


def _trained(rank: int, world_size: int) -> None:
    for flag, sharded, zeroed, accumulate in ((f, s, z, 1 + s) for f in FLAGS for s in (False, True) for z in (0, 1)):
        where = f"{flag} sharded {sharded} zero_out_wgrad {zeroed} rank {rank}"
        plain = Fused(None)
        theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
        model = DistributedDataParallel(Fused(flag), grad_reduce_in_fp32=True, use_distributed_optimizer=sharded)
        model.module.weight.zero_out_wgrad = bool(zeroed)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        for step in range(3):
            inputs = [[_input(step, other, i) for i in range(accumulate)] for other in range(world_size)]
            theirs.zero_grad()
            (sum(plain(x, False) for of_rank in inputs for x in of_rank) / world_size).backward()
            theirs.step()
            optimizer.zero_grad() if step < 2 else model.zero_grad_buffer()
            assert model.module.weight.grad_added_to_main_grad is False, where
            for i, x in enumerate(inputs[rank]):
                model.require_backward_grad_sync = i == accumulate - 1
                model(x).backward()
            optimizer.step()
            for got, want in zip(model.module.parameters(), plain.parameters(), strict=True):
                assert torch.allclose(got, want, rtol=1e-4, atol=1e-6), (where, step)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_kernel_has_added_counts_once(backend):
    run_ranks(_trained, 2, backend, timeout=60)


def _refused(rank: int, world_size: int) -> None:
    for flag in FLAGS[:2]:
        with pytest.raises(ValueError, match=rf"module \(Fused\) has {flag}=True.*: expected grad_reduce_in_fp32=True"):
            DistributedDataParallel(Fused(flag))
    for options in ({}, {"grad_reduce_in_fp32": True}):
        model = DistributedDataParallel(Fused(None), **options)
        model(_input(rank)).backward()
        model.zero_grad_buffer()
        with pytest.raises(RuntimeError, match=r"of the group: parameter 'weight' has grad_added_to_main_grad=True"):
            model(_input(rank)).backward()


def test_a_kernel_that_adds_where_nobody_expects_it_is_refused_by_name():
    run_ranks(_refused, 2, BACKENDS[-1], timeout=60)


def _copied(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Fused(FLAGS[0]), grad_reduce_in_fp32=True)
    other = copy.deepcopy(model)
    for one in (model, other):
        one.zero_grad_buffer()
        one(_input(rank)).backward()
    assert torch.equal(model.module.weight.main_grad, other.module.weight.main_grad)


def test_copies_know_it_too():
    run_ranks(_copied, 2, BACKENDS[-1], timeout=60)
