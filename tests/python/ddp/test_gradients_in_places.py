"""Gradients that stay where autograd has computed them, whatever users do to them between steps: against torch's DDP."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS, fewer, grads
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from farandole.ddp import DistributedDataParallel
from support.devices import ON_CPU, backend_for, seeded
from support.processes import run_ranks

_WIDTH = 96  # a weight has 36 KiB, more than what is copied; a bias less
_STEPS = 25


class _Network(torch.nn.Module):
    """Of which a forward may leave a layer out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(3))
        self.together = torch.nn.Parameter(torch.randn(2, _WIDTH, _WIDTH))  # gradients of both halves are parts of one

    def forward(self, x: torch.Tensor, skipped: int) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            if index != skipped:
                x = torch.tanh(layer(x))
        first, second = self.together.unbind()
        return (x @ first + x @ second.t()).square().mean()


def _do(action: str, model: Any, rng: random.Random) -> None:
    parameters = list(model.module.parameters())
    if action == "set to None":
        model.zero_grad(set_to_none=True)
    elif action == "zeroed":
        model.zero_grad(set_to_none=False)
    elif action == "some None":
        for parameter in rng.sample(parameters, 3):
            parameter.grad = None
    elif action == "replaced":
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 0.5)
    elif action == "buffers zeroed":
        if isinstance(model, DistributedDataParallel):
            model.zero_grad_buffer()
        else:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()
    elif action == "scaled":
        if isinstance(model, DistributedDataParallel):
            model.scale_gradients(0.5)
        else:
            for parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad.mul_(0.5)
    elif action == "hook":
        model.register_comm_hook(model.process_group, default_hooks.allreduce_hook)


def _compare(rank: int, world_size: int, seeds: list[int], as_view: bool) -> None:
    oracle_group = dist.new_group(backend=backend_for("gloo"))
    num_kept = 0
    for seed in seeds:
        rng, mine = random.Random(seed), random.Random(1000 * seed + rank)
        torch.manual_seed(seed)
        module = _Network()
        options = {"find_unused_parameters": True, "gradient_as_bucket_view": as_view}
        expected = TorchDdp(copy.deepcopy(module), process_group=oracle_group, **options)
        actual = DistributedDataParallel(module, bucket_size=rng.choice([1, 20_000, None]), **options)
        hook_at = rng.randrange(2 * _STEPS)
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []  # gradients that the user has, and what they were
        for step in range(_STEPS):
            names = ["set to None", "zeroed", "some None", "replaced", "buffers zeroed", "scaled", "nothing"]
            action = "hook" if step == hook_at else rng.choice(names)
            choice = rng.random()
            if action == "set to None":
                found = [p.grad for p in actual.module.parameters() if p.grad is not None]
                kept += [(g, g.clone()) for g in found if g.untyped_storage().nbytes() == g.nbytes]
            for model in (expected, actual):
                _do(action, model, random.Random(choice))
            x = torch.randn(4, _WIDTH, generator=seeded(mine.randrange(2**31)))
            skipped = rng.choice([-1, 0, 1, 2])
            accumulates = rng.random() < 0.3
            for model in (expected, actual):
                if accumulates:
                    with model.no_sync():
                        model(x, skipped).backward()
                model(x, skipped).backward()
            context = f"seed {seed}, step {step}, {action}"
            for name, grad in grads(expected).items():
                theirs = grads(actual)[name]
                assert (grad is None) == (theirs is None), f"{context}: {name}"
                if grad is not None:
                    assert torch.equal(theirs, grad), f"{context}: {name}: {(theirs - grad).abs().max()}"
            for parameter in actual.module.parameters():
                if parameter.grad is not None:
                    assert parameter.grad.data_ptr() == parameter.main_grad.data_ptr(), context
            for grad, before in kept:
                assert torch.equal(grad, before), context
        num_kept += len(kept)
    if dist.get_backend() == "farandole":
        assert (num_kept > 0) == (ON_CPU and not as_view)


@pytest.mark.parametrize("as_view", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_are_those_of_torchs_wrapper_whatever_is_done_between_steps(backend, as_view):
    run_ranks(_compare, 2, backend, seeds=list(range(fewer(4))), as_view=as_view)
