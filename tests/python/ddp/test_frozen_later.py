"""Parameters that are frozen while a model trains stay where they are, and go on where they were, as under torch's DDP."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import backend_for
from support.processes import run_ranks

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "float32": ({"grad_reduce_in_fp32": True}, {}),
    "sharded": ({"use_distributed_optimizer": True}, {}),
    "sharded, small buckets": ({"use_distributed_optimizer": True, "bucket_size": 1, "overlap_param_gather": True}, {}),
    "in parts": (
        {"use_distributed_optimizer": True, "bucket_size": 1, "overlap_param_gather": True},
        {"overlap_param_gather_with_optimizer_step": True},
    ),
    "whole": ({"use_distributed_optimizer": True}, {"is_elementwise": False}),
}


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second, self.third = (torch.nn.Linear(7, 7) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.third(self.second(self.first(x).tanh()).tanh()).square().mean()


def _sgd(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9, weight_decay=0.1)


def _adam(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.05, weight_decay=0.1)


def _freeze(rank: int, world_size: int, kind: str) -> None:
    gloo = dist.new_group(backend=backend_for("gloo"))
    for_model, for_optimizer = KINDS[kind]
    for made in (_sgd, _adam):
        theirs = TorchDdp(_Model(), process_group=gloo, find_unused_parameters=True)
        ours = DistributedDataParallel(_Model(), find_unused_parameters=True, **for_model)
        optimizers = made(theirs), DistributedOptimizer(made(ours), ours, **for_optimizer)
        for step in range(8):
            for model in (theirs, ours):
                model.module.second.requires_grad_(not 2 <= step < 5)
                model.module.first.bias.requires_grad_(step != 4)
            before = ours.module.second.weight.detach().clone()
            x = torch.randn(4, 7, generator=torch.Generator().manual_seed(10 * step + rank))
            for model, optimizer in zip((theirs, ours), optimizers, strict=True):
                optimizer.zero_grad()
                model(x).backward()
                optimizer.step()
            if kind != "float32":
                ours.start_param_sync(force_sync=True)
            assert torch.equal(before, ours.module.second.weight) == (2 <= step < 5), step
            if made is _adam and step >= 5 and kind != "whole":
                break  # the counts of parts that share a tensor have gone on
            for name, value in ours.module.named_parameters():
                difference = (value - theirs.module.get_parameter(name)).abs().max()
                assert difference < 1e-6, (made.__name__, step, name, difference)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_frozen_does_not_move(kind):
    run_ranks(_freeze, 2, "farandole", timeout=60, kind=kind)


def _add_to_stale(rank: int, world_size: int) -> None:
    """One rank forgets zero_grad()."""
    model = DistributedDataParallel(_Model(), use_distributed_optimizer=True, bucket_size=1)
    optimizer = DistributedOptimizer(_sgd(model), model)
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(rank))
    for step in range(4):
        if step != 2 or rank != 1:
            optimizer.zero_grad()
        if step == 2:
            with pytest.raises(
                RuntimeError, match=r"rank 1 of the group: parameter '\w+\.\w+' gets a gradient while the"
            ):
                model(x).backward()
            continue
        model(x).backward()
        optimizer.step()
    for value in model.parameters():
        of_ranks = [torch.empty_like(value) for _ in range(world_size)]
        dist.all_gather(of_ranks, value.detach())
        assert all(torch.equal(one, value) for one in of_ranks)


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_ranks_are_told_of_one_that_adds_to_gradients_of_the_step_before(backend):
    run_ranks(_add_to_stale, 2, backend, timeout=60)
