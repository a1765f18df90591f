"""Rounds of start_grad_sync() and finish_grad_sync(): what backwards that accumulate have left is what one that
synchronizes would have made of it."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from ddp_models import BACKENDS, RandomModel

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.processes import run_ranks

_WAYS = {
    "grad": {},
    "view": {"gradient_as_bucket_view": True},
    "fp32": {"grad_reduce_in_fp32": True},
    "sharded": {"use_distributed_optimizer": True},
}


def _left(model: DistributedDataParallel, way: str) -> dict[str, torch.Tensor | None]:
    """What a round has left of each gradient."""
    if way in ("grad", "view"):
        return {name: parameter.grad for name, parameter in model.module.named_parameters()}
    return {name: parameter.main_grad for name, parameter in model.module.named_parameters() if parameter.requires_grad}


def _rounds(rank: int, world_size: int, seed: int, way: str) -> int:
    """The last of three backwards synchronizes, or an explicit round does; which parameters they use is random. Returns
    for how many parameters no rank had a gradient."""
    modules = [RandomModel(seed, branches=True) for _ in range(2)]
    models = [
        DistributedDataParallel(module, unused_parameters="skip", bucket_size=200, **_WAYS[way]) for module in modules
    ]
    optimizers = [_optimizer(model, way) for model in models]
    unused = 0
    for step in range(4):
        for optimizer in optimizers:
            if step != 2 or way == "sharded":  # once nothing is zeroed
                optimizer.zero_grad()
        by_backward, explicitly = models
        for number in range(3):
            x = modules[0].batch(seed, step, rank, number)
            for model in models:
                if number < 2 or model is explicitly:
                    with model.no_sync():
                        model(x).backward()
                else:
                    model(x).backward()
        explicitly.start_grad_sync()
        explicitly.finish_grad_sync()
        got, want = _left(explicitly, way), _left(by_backward, way)
        for name in want:
            where = f"seed {seed}, {way}, step {step}, rank {rank}, {name}"
            assert (got[name] is None) == (want[name] is None), where
            unused += want[name] is None
            if want[name] is not None and way != "sharded":  # of a sharded one each rank has its part
                torch.testing.assert_close(got[name], want[name], equal_nan=True, msg=where)
        for optimizer in optimizers:
            optimizer.step()
        for (name, one), other in zip(modules[0].named_parameters(), modules[1].parameters(), strict=True):
            where = f"seed {seed}, {way}, step {step}, rank {rank}, {name}"
            torch.testing.assert_close(other, one, equal_nan=True, msg=where)
    return unused


def _optimizer(model: DistributedDataParallel, way: str) -> torch.optim.Optimizer:
    plain = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    return plain if way in ("grad", "view") else DistributedOptimizer(plain, model)


def _all_seeds(rank: int, world_size: int, seeds: list[int], way: str) -> int:
    return sum(_rounds(rank, world_size, seed, way) for seed in seeds)


@pytest.mark.parametrize("way", list(_WAYS))
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_explicit_round_leaves_what_a_backward_that_synchronizes_does(backend, way):
    first = random.randrange(1 << 30)
    print(f"seed {first}")
    unused = run_ranks(_all_seeds, 2, backend, timeout=90, seeds=list(range(first, first + 5)), way=way)
    assert unused[0] == unused[1]


class _Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.branches[chosen](x).square().sum()


def _skipped(rank: int, world_size: int, way: str) -> None:
    """Rank 0 uses branch 0, rank 1 branch 1; 2 gets a gradient by hand, nobody uses 3."""
    model = DistributedDataParallel(_Branches(), unused_parameters="skip", **_WAYS[way])
    alone = copy.deepcopy(model.module)
    grads = []
    for chosen in range(2):
        x = torch.full((2, 3), 1.0 + chosen)
        alone.branches[chosen](x).square().sum().backward()
        grads.append(alone.branches[chosen].weight.grad / world_size)
    weights = [branch.weight for branch in model.module.branches]
    with model.no_sync():
        model(torch.full((2, 3), 1.0 + rank), rank).backward()
    weights[2].grad = torch.full((3, 3), 2.0 * rank)
    model.start_grad_sync()
    model.finish_grad_sync()
    for chosen in range(2):
        torch.testing.assert_close(weights[chosen].grad, grads[chosen])
    torch.testing.assert_close(weights[2].grad, torch.ones(3, 3))
    assert weights[3].grad is None


@pytest.mark.parametrize("way", ["grad", "view"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_no_rank_has_a_gradient_for_stays_without_one_and_one_set_by_hand_counts(backend, way):
    run_ranks(_skipped, 2, backend, timeout=60, way=way)
