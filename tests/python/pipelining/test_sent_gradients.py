"""A gradient that has arrived is needed no more where it was made."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from farandole.pipelining import PipelineStage, get_schedule_class
from pipelining.pipeline_support import BACKENDS
from support.devices import only_on_cpu
from support.processes import run_ranks

pytestmark = only_on_cpu("hosts run ahead of GPUs, and works keep what they send")

COUNT = 24


class _Watch:
    """Counts the gradients that there are."""

    def __init__(self) -> None:
        self.alive = self.most = self.made = 0

    def add(self, array: Any) -> None:
        self.alive, self.made = self.alive + 1, self.made + 1
        self.most = max(self.most, self.alive)
        weakref.finalize(array, self._remove)

    def _remove(self) -> None:
        self.alive -= 1


class _Watched(torch.autograd.Function):
    """The identity; the gradient of its input lies in memory that tells when it is let go."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, watch: _Watch) -> torch.Tensor:
        ctx.watch = watch
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        array = grad.numpy().copy()
        ctx.watch.add(array)
        return torch.from_numpy(array), None


class _Stage(nn.Module):
    def __init__(self, watch: _Watch):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.watch = watch

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(_Watched.apply(x, self.watch) if x.requires_grad else x)


def _count(rank: int, world_size: int, name: str) -> tuple[int, int, int]:
    """The most gradients of inputs at once in a steady step, how many it made, and how many are left after it."""
    watch = _Watch()
    schedule = get_schedule_class(name)(PipelineStage(_Stage(watch), rank, world_size, "cpu"), COUNT, nn.MSELoss())
    batch = torch.ones(COUNT * 256, 64)
    for _ in range(2):
        schedule.step(batch, target=batch)
    watch.most = watch.made = 0
    schedule.step(batch, target=batch)
    return watch.most, watch.made, watch.alive


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
def test_gradients_that_were_sent_do_not_pile_up_until_the_end_of_a_step(backend, name):
    for rank, (most, made, left) in enumerate(run_ranks(_count, 3, backend, name=name)):
        assert made == (COUNT if rank > 0 else 0)
        assert most <= 6, f"rank {rank}"  # those of as many microbatches as are between two ranks
        assert left == 0, f"rank {rank}"
