"""What stays each rank's own: parameters and buffers that are to be ignored, buffers that are not broadcast."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import backend_for
from support.processes import run_ranks

_OWN = ("table.weight", "inner.own", "inner.count")


class _Inner(torch.nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.own = torch.nn.Parameter(torch.full((2 + rank,), 1.0 + rank))
        self.shared = torch.nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.full((1 + rank,), float(rank)))
        self.register_buffer("common", torch.full((2,), float(rank)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.common += 1
        return x * self.shared.sum() * self.own.sum()


class _PartlyOwn(torch.nn.Module):
    """A row of a table for each rank, a parameter and a buffer of the rank's own shape, and some that all share."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.table = torch.nn.Embedding(4 + rank, 3)
        self.inner = _Inner(rank)
        self.head = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table(torch.tensor([1, 3]))
        return self.head(self.inner(rows * x)).square().mean()


def _train(model: torch.nn.Module, rank: int, joins: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    with model.join(enable=joins):
        for step in range(3 + (rank if joins else 0)):
            optimizer.zero_grad()
            model(torch.full((3,), 1.0 + rank + step)).backward()
            optimizer.step()


def _ignored(rank: int, world_size: int, joins: bool) -> None:
    gloo = dist.new_group(backend=backend_for("gloo"))
    models = []
    for kind, options in ((TorchDdp, {"process_group": gloo}), (DistributedDataParallel, {"bucket_size": 4})):
        module = _PartlyOwn(rank)
        kind._set_params_and_buffers_to_ignore_for_model(module, _OWN)
        models.append(kind(module, **options))
        _train(models[-1], rank, joins)
    theirs, ours = (model.state_dict() for model in models)
    assert theirs.keys() == ours.keys()
    for name, want in theirs.items():
        torch.testing.assert_close(ours[name], want, msg=f"rank {rank} {name}")
    assert {name for name, parameter in models[1].module.named_parameters() if hasattr(parameter, "main_grad")} == {
        "inner.shared",
        "head.weight",
        "head.bias",
    }
    again = copy.deepcopy(models[1]) if not joins else models[1]  # a copy ignores the same
    again(torch.ones(3)).backward()
    assert again.module.inner.own.grad.shape == (2 + rank,)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("joins", [False, True])
def test_what_is_to_be_ignored_stays_each_ranks_own_as_in_torch(backend, joins):
    run_ranks(_ignored, 2, backend, joins=joins)


class _Tied(torch.nn.Module):
    """One parameter by two names, the first of which is ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(2, 2, bias=False)
        self.second = torch.nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self._ddp_params_and_buffers_to_ignore = ["first.weight"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).sum()


def _tied(rank: int, world_size: int) -> None:
    for sharded in (False, True):
        model = DistributedDataParallel(_Tied(), use_distributed_optimizer=sharded)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if sharded:
            optimizer = DistributedOptimizer(optimizer, model)
        model(torch.full((2,), 1.0 + rank)).backward()
        optimizer.step()
        weights = [torch.empty(2, 2) for _ in range(world_size)]
        dist.all_gather(weights, model.module.first.weight.detach())
        assert weights[0].equal(weights[1])


def test_a_parameter_is_reduced_that_has_a_name_which_is_not_ignored():
    run_ranks(_tied, 2, "gloo")


class _Counting(torch.nn.Module):
    def __init__(self, rank: int, shape: int) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.full((shape,), 10.0 * rank))

    def forward(self, x: float) -> torch.Tensor:
        self.count += 1
        return x * self.weight.sum()


def _buffers(rank: int, world_size: int) -> None:
    gloo = dist.new_group(backend=backend_for("gloo"))
    for shape in (1, 1 + rank):
        for kind, options in ((TorchDdp, {"process_group": gloo}), (DistributedDataParallel, {})):
            model = kind(_Counting(rank, shape), broadcast_buffers=False, **options)
            model(1.0).backward()
            assert model.module.count.tolist() == [10.0 * rank + 1] * shape, (kind, shape)


def test_buffers_that_are_not_broadcast_are_each_ranks_own_from_the_start_on_as_in_torch():
    run_ranks(_buffers, 2, "gloo")
