"""A rank of the schedules' benchmark: stages that sleep in F, I and W instead of computing."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from farandole import pipelining
from farandole.bench._ranks import Rank


class SleepInBackward(torch.autograd.Function):
    """The identity; its backward sleeps."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return grads[0], None


class SleepingStage(nn.Module):
    """Sleeps in its forward, on the way to its input's gradient, and on that to its weight's."""

    def __init__(self, seconds: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))
        self._seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self._seconds)
        weight = SleepInBackward.apply(self.weight, self._seconds)
        return SleepInBackward.apply(x, self._seconds) * weight


def sleep_often(rank: Rank, seconds: float, count: int) -> float:
    """Runs on all ranks: the seconds that a sleep of so many really takes."""
    dist.barrier(rank.groups["farandole"])
    start = time.monotonic()
    for _ in range(count):
        time.sleep(seconds)
    return (time.monotonic() - start) / count


def run_steps(rank: Rank, name: str, plan: str, seconds: float, count: int) -> list[tuple[float, float]]:
    """Runs on all ranks: when each step began and ended by the host's clock, in seconds, after one that warms up."""
    if name not in rank.state:
        made = pipelining.Plan.from_csv(plan)
        mine = [index for index, owner in enumerate(made.rank_of_stage) if owner == rank.rank]
        stages = [
            pipelining.PipelineStage(
                SleepingStage(seconds), index, made.num_stages, "cpu", group=rank.groups["farandole"]
            )
            for index in mine
        ]
        rank.state[name] = pipelining.ScheduleFromPlan(stages, made, nn.functional.mse_loss)
    schedule = rank.state[name]
    batch = torch.ones(schedule.plan().num_microbatches, 8)
    taken = []
    for _ in range(1 + count):
        dist.barrier(rank.groups["farandole"])
        start = time.monotonic()
        schedule.step(batch, target=batch, return_outputs=False)
        taken.append((start, time.monotonic()))
    return taken[1:]
