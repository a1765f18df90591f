"""NaN and infinity in losses and gradients, where that is asked for: an error on all ranks that names stage and microbatch."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn

from farandole.pipelining import PipelineStage, ScheduleGPipe, ScheduleZBH1, ScheduleZBVZeroBubble
from pipelining.pipeline_support import BACKENDS, assert_same_gradients, train_alone
from support.devices import DEVICE
from support.processes import run_ranks

MICROBATCHES = 4


class _Spoil(torch.autograd.Function):
    """The identity, whose gradient is of that value in one place."""

    @staticmethod
    def forward(ctx, x, value):
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        grad[-1, -1] = ctx.value
        return grad, None


class _Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.spoiled: tuple[int, float] | None = None  # which call, with what
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at, value = self.spoiled or (-1, 0.0)
        if self.calls == at:
            x = _Spoil.apply(x, value)
        self.calls += 1
        return self.linear(x)


def _spoil(rank: int, world_size: int, seed: int) -> None:
    rng = random.Random(seed)
    for make, placed in (
        (ScheduleGPipe, [*range(world_size)]),
        (ScheduleZBH1, [*range(world_size)]),
        (ScheduleZBVZeroBubble, [*range(world_size), *reversed(range(world_size))]),
    ):
        torch.manual_seed(seed)
        modules = [_Stage() for _ in placed]
        batch, target = torch.randn(2 * MICROBATCHES, 3), torch.randn(2 * MICROBATCHES, 3)
        alone, _, _ = train_alone(copy.deepcopy(modules), nn.MSELoss(), batch, target, MICROBATCHES)
        mine = [stage for stage, owner in enumerate(placed) if owner == rank]
        stages = [PipelineStage(modules[stage], stage, len(placed), DEVICE) for stage in mine]
        spoiled_loss = [-1, 0.0]
        calls = [0]

        def loss_fn(output, wanted, spoiled_loss=spoiled_loss, calls=calls):
            calls[0] += 1
            loss = nn.functional.mse_loss(output, wanted)
            return loss * spoiled_loss[1] if calls[0] - 1 == spoiled_loss[0] else loss

        for checks in (True, False):
            given = stages[0] if make is not ScheduleZBVZeroBubble else stages
            schedule = make(given, MICROBATCHES, loss_fn, check_for_nan_in_loss_and_grad=checks)
            for case in range(6):
                value, microbatch = rng.choice([float("nan"), float("inf")]), rng.randrange(MICROBATCHES)
                stage = rng.randrange(1, len(placed))
                in_loss = case % 2 == 0
                where = f"seed {seed}, {make.__name__}, {case}: {'loss' if in_loss else stage}, {microbatch}, {value}"
                calls[0], spoiled_loss[:] = 0, [microbatch if in_loss else -1, value]
                for number, module in enumerate(modules):
                    module.calls = 0
                    module.spoiled = (microbatch, value) if number == stage and not in_loss else None
                    module.zero_grad()
                failing = len(placed) - 1 if in_loss else stage
                what = (
                    "the loss is NaN or infinite" if in_loss else "backward: the gradient of input 0 is NaN or infinite"
                )
                if checks:
                    with pytest.raises(RuntimeError) as raised:
                        schedule.step(batch, target=target)
                    name = f"rank {placed[failing]}, stage {failing}, microbatch {microbatch}: {what}"
                    assert name in str(raised.value), (where, raised.value)
                else:
                    schedule.step(batch, target=target)
                spoiled_loss[0] = -1
                for module in modules:
                    module.spoiled = None
                    module.zero_grad()
                schedule.step(batch, target=target)
                for number in mine:
                    assert_same_gradients(modules[number], alone[number], where, 1e-6)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_finite_reaches_all_ranks_and_the_next_step_runs(backend: str, world_size: int) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print("seed", seed)
    run_ranks(_spoil, world_size, backend, seed=seed)
