"""Parameters that share memory: where they would part they are refused by name, elsewhere they are as in one process."""

from __future__ import annotations

import functools

import pytest
import torch
from ddp_models import BACKENDS

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import seeded
from support.processes import run_ranks


class _Pair(torch.nn.Module):
    """Two layers, of which the second one's weight has memory of the first one's."""

    def __init__(self, kind: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second = (torch.nn.Linear(4, 4, dtype=dtype) for _ in range(2))
        whole = torch.randn(4, 8, dtype=dtype)
        if kind == "data":
            self.second.weight.data = self.first.weight.data
        elif kind == "part":
            self.second.bias = torch.nn.Parameter(self.first.weight.data[1])
        elif kind == "frozen":
            self.second.weight = torch.nn.Parameter(self.first.weight.data, requires_grad=False)
        elif kind == "buffer":
            self.register_buffer("seen", self.first.weight.data.view(-1))
        elif kind == "tied":
            self.second.weight = self.first.weight
        elif kind == "columns":
            self.first.weight, self.second.weight = (torch.nn.Parameter(part) for part in whole.split(4, dim=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x.to(self.first.weight.dtype)))).float().square().mean()


def _input(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=seeded(10 * step + rank))


def _refused(rank: int, world_size: int) -> None:
    for kind, names in (
        ("data", ("first.weight", "second.weight")),
        ("part", ("first.weight", "second.bias")),
        ("frozen", ("first.weight", "second.weight")),
        ("buffer", ("first.weight", "seen")),
    ):
        with pytest.raises(ValueError, match="shares memory with") as refused:
            DistributedDataParallel(_Pair(kind if rank == 1 else ""), use_distributed_optimizer=True)
        assert all(f"'{name}'" in str(refused.value) for name in names), refused.value
    model = DistributedDataParallel(_Pair("data", torch.bfloat16), grad_reduce_in_fp32=True)
    with pytest.raises(ValueError, match=r"shares memory with .* has float32 copies"):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_that_would_part_are_refused_by_name(backend):
    run_ranks(_refused, 2, backend)


def _trains(rank: int, world_size: int) -> None:
    # One kernel for all parameters would step what two of them share in any order.
    sgd = functools.partial(torch.optim.SGD, lr=0.2, momentum=0.5, foreach=False)
    for kind, options in (
        ("data", {}),
        ("part", {"grad_reduce_in_fp32": True}),
        ("buffer", {}),
        ("tied", {"use_distributed_optimizer": True}),
        ("columns", {"use_distributed_optimizer": True, "overlap_param_gather": True}),
    ):
        plain, ours = _Pair(kind), _Pair(kind)
        model = DistributedDataParallel(ours, **options)
        expected = sgd(plain.parameters())
        optimizer = DistributedOptimizer(sgd(model.parameters()), model)
        for step in range(3):
            optimizer.zero_grad()
            expected.zero_grad()
            model(_input(step, rank)).backward()
            sum(plain(_input(step, other)) / world_size for other in range(world_size)).backward()
            optimizer.step()
            expected.step()
        got = dict(model.named_parameters())
        for name, want in plain.named_parameters():
            torch.testing.assert_close(got[f"module.{name}"], want, rtol=1e-5, atol=1e-6, msg=f"{kind} {name}")


def test_those_that_stay_together_train_as_in_one_process():
    run_ranks(_trains, 2, BACKENDS[-1])


def _first_forward_makes_buffers(rank: int, world_size: int) -> None:
    for options in ({}, {"use_distributed_optimizer": True}):
        torch.manual_seed(5)
        module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LazyBatchNorm1d(affine=False))
        model = DistributedDataParallel(module, **options)
        inputs = [_input(0, other) for other in range(world_size)]
        for _ in range(2):
            model(inputs[rank]).square().mean().backward()
            model.zero_grad()
        got, want = module[1].running_mean, 0.1 * module[0](inputs[0]).mean(0) * 0.9
        want = want + 0.1 * module[0](inputs[rank]).mean(0)
        torch.testing.assert_close(got, want, msg=str(options))


def test_buffers_that_the_first_forward_makes_need_no_memory_before():
    run_ranks(_first_forward_makes_buffers, 2, BACKENDS[-1])
