"""What a schedule says of its last step agrees with the plan and with the simulator."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from farandole.pipelining import PipelineStage, Schedule1F1B, plan, simulate
from pipelining.pipeline_support import BACKENDS
from pipelining.step_support import pause, prepare_pauses
from support.devices import DEVICE
from support.processes import run_ranks

FORWARD, BACKWARD = 0.02, 0.04


class Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        pause(FORWARD)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        pause(BACKWARD)
        return grad


class Slow(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Wait.apply(self.linear(x))


def _trace(rank: int, world_size: int):
    prepare_pauses(rank, world_size)
    schedule = Schedule1F1B(PipelineStage(Slow(), rank, world_size, DEVICE), 6, nn.MSELoss())
    schedule.times_device = True
    batch, target = torch.randn(6, 2), torch.randn(6, 2)
    for _ in range(3):  # shapes are learned, ranks connected
        schedule.step(batch, target=target)
    return schedule.plan().actions[rank], schedule.last_step_trace(), schedule.last_step_bubble()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_trace_follows_the_plan_and_the_bubble_is_the_simulated_one(backend: str) -> None:
    results = run_ranks(_trace, 2, backend)
    seconds = {}
    for actions, trace, _ in results:
        assert [action for action, _, _ in trace] == actions
        assert all(start <= end for _, start, end in trace)
        assert all(a[2] <= b[1] + 1e-9 for a, b in itertools.pairwise(trace))
        seconds |= {action: end - start for action, start, end in trace}
    made = plan("1F1B", 2, 6)
    predicted = simulate(made, {action: seconds[action] for rank in made.actions for action in rank})
    for rank, (_, _, bubble) in zip(predicted.ranks, results, strict=True):
        assert rank.bubble - 0.02 < bubble < rank.bubble + 0.15


def _profile(rank: int, world_size: int) -> tuple[list[str], list[str]]:
    schedule = Schedule1F1B(PipelineStage(nn.Linear(2, 2), rank, world_size, DEVICE), 3, nn.MSELoss())
    batch, target = torch.randn(6, 2), torch.randn(6, 2)
    schedule.step(batch, target=target)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        schedule.step(batch, target=target)
    events = sorted(profile.events(), key=lambda event: event.time_range.start)
    return schedule.plan().actions[rank], [event.name for event in events if event.name.startswith("PP:")]


def test_a_profile_names_actions_as_torchs_own_runtime_does() -> None:
    for actions, names in run_ranks(_profile, 2, "gloo"):
        assert names == [f"PP:{action}" for action in actions]
