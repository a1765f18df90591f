"""A pipeline trains as one process does: same losses, outputs and gradients, bit for bit."""

from __future__ import annotations

import copy
import random
import time

import pytest
import torch
from torch import nn

from farandole.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, get_schedule_class, plan
from pipelining.pipeline_support import BACKENDS, assert_same_gradients, random_stages, train_alone
from support.devices import DEVICE
from support.processes import run_ranks

CASES_PER_RUN = 6


def _train_random_models(rank: int, world_size: int, seed: int) -> int:
    for case in range(CASES_PER_RUN):
        rng = random.Random(seed + case)
        context = f"seed {seed + case}"
        stages = random_stages(rng, world_size, in_place=True)
        n_microbatches = rng.randint(1, 9)
        schedule_class = rng.choice([ScheduleGPipe, Schedule1F1B])
        scale = rng.random() < 0.7
        loss_fn = nn.MSELoss()
        schedule = schedule_class(
            PipelineStage(stages[rank], rank, world_size, DEVICE), n_microbatches, loss_fn, scale_grads=scale
        )
        rows = 0
        for step in range(3):  # learns shapes, uses them, learns others
            if step != 1:
                rows = rng.randint(n_microbatches, 4 * n_microbatches)
            batch = torch.randn(rows, stages[0][0].in_features)
            with torch.no_grad():
                target = torch.randn_like(nn.Sequential(*stages)(batch))
            losses = ["left over"]
            stages[rank].zero_grad()
            output = schedule.step(batch, target=target, losses=losses)
            fresh = [_without_grads(stage) for stage in stages]
            alone, expected_losses, expected_output = train_alone(fresh, loss_fn, batch, target, n_microbatches, scale)
            where = f"{context}, step {step}, {schedule_class.__name__}, rank {rank}, {n_microbatches} microbatches"
            assert_same_gradients(stages[rank], alone[rank], where)
            if rank == world_size - 1:
                assert torch.equal(torch.stack(losses), torch.stack(expected_losses)), where
                assert torch.equal(output, expected_output), where
                assert not output.requires_grad
            else:
                assert losses == ["left over"], where
                assert output is None, where
    return CASES_PER_RUN


def _without_grads(stage: nn.Module) -> nn.Module:
    clone = copy.deepcopy(stage)
    clone.zero_grad()
    return clone


@pytest.mark.sample(4)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_random_models_train_as_in_one_process(backend: str, world_size: int) -> None:
    seed = int(time.time()) % 1_000_000 * 100
    print(f"seed {seed}")
    assert run_ranks(_train_random_models, world_size, backend, seed=seed) == [CASES_PER_RUN] * world_size


def _train_against_whole_batch(rank: int, world_size: int) -> float:
    torch.manual_seed(5)
    stages = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(world_size)]
    batch, target = torch.randn(32, 16), torch.randn(32, 16)
    schedule = Schedule1F1B(PipelineStage(stages[rank], rank, world_size, DEVICE), 8, nn.MSELoss())
    schedule.step(batch, target=target)
    alone, _, _ = train_alone([_without_grads(stage) for stage in stages], nn.MSELoss(), batch, target, 1)
    pairs = zip(stages[rank].parameters(), alone[rank].parameters(), strict=True)
    return max(((p.grad - q.grad).abs().max() / q.grad.abs().max()).item() for p, q in pairs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_microbatches_sum_to_the_whole_batch_within_rounding(backend: str) -> None:
    assert max(run_ranks(_train_against_whole_batch, 2, backend)) < 1e-5


def _train_in_dtype(rank: int, world_size: int) -> None:
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        rng = random.Random(7)
        stages = random_stages(rng, world_size, dtype)
        batch = torch.randn(8, stages[0][0].in_features, dtype=dtype)
        with torch.no_grad():
            target = torch.randn_like(nn.Sequential(*stages)(batch))
        schedule = ScheduleGPipe(PipelineStage(stages[rank], rank, world_size, DEVICE), 4, nn.MSELoss())
        schedule.step(batch, target=target)
        alone, _, _ = train_alone([_without_grads(s) for s in stages], nn.MSELoss(), batch, target, 4)
        assert_same_gradients(stages[rank], alone[rank], dtype)


@pytest.mark.parametrize("backend", BACKENDS)
def test_activations_of_other_dtypes_train_as_in_one_process(backend: str) -> None:
    run_ranks(_train_in_dtype, 2, backend)


def _accumulate(rank: int, world_size: int) -> None:
    stages = random_stages(random.Random(11), world_size)
    batch = torch.randn(12, stages[0][0].in_features)
    with torch.no_grad():
        target = torch.randn_like(nn.Sequential(*stages)(batch))
    schedule = Schedule1F1B(PipelineStage(stages[rank], rank, world_size, DEVICE), 3, nn.MSELoss())
    schedule.step(batch, target=target)
    first = [p.grad.clone() for p in stages[rank].parameters()]
    schedule.step(batch, target=target)
    for parameter, once in zip(stages[rank].parameters(), first, strict=True):
        assert torch.allclose(parameter.grad, 2 * once)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_two_steps_add_up(backend: str) -> None:
    run_ranks(_accumulate, 2, backend)


class _Shifts(nn.Module):
    """Autograd gives the input and ``shift`` one and the same gradient, in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.view(1, 8) + self.shift.view(1, 8)) * self.scale


def _train_stages_that_shift(rank: int, world_size: int) -> None:
    for name in ("GPipe", "LoopedBFS", "V-Half", "ZBV", "InterleavedZeroBubble"):
        num_stages = world_size if name == "GPipe" else 2 * world_size
        owners = plan(name, num_stages, 4, num_ranks=world_size).rank_of_stage
        modules = [_Shifts() for _ in range(num_stages)]
        alone = copy.deepcopy(modules)
        stages = [PipelineStage(modules[i], i, num_stages, DEVICE) for i, owner in enumerate(owners) if owner == rank]
        given = stages[0] if name == "GPipe" else stages
        schedule = get_schedule_class(name)(given, 4, lambda output, target: (output * target).sum())
        x, y = torch.ones(4, 8), torch.arange(1.0, 5)[:, None].expand(4, 8).contiguous()
        schedule.step(x, target=y)
        for a, b in zip(x.split(1), y.split(1), strict=True):
            for module in alone:
                a = module(a)
            ((a * b).sum() / 4).backward()
        for i in (i for i, owner in enumerate(owners) if owner == rank):
            for mine, other in zip(modules[i].parameters(), alone[i].parameters(), strict=True):
                assert mine.grad is not None and other.grad is not None
                assert torch.allclose(mine.grad, other.grad), (name, i, mine.grad, other.grad)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_gradient_of_an_input_is_not_added_to_with_that_of_a_parameter(world_size: int) -> None:
    run_ranks(_train_stages_that_shift, world_size, "farandole")


def _train_a_loss_with_a_parameter(rank: int, world_size: int) -> None:
    module, weight = nn.Linear(3, 3), nn.Parameter(torch.ones(1))
    doubled = torch.zeros(1, requires_grad=True)

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = (output - target).square().mean() + weight.squeeze() + 0 * doubled.squeeze()
        loss.register_hook(lambda grad: grad.mul_(2))
        return loss

    schedule = ScheduleGPipe(PipelineStage(module, 0, 1, DEVICE), 2, loss_fn)
    x, y = torch.ones(4, 3), torch.zeros(4, 3)
    seen = []
    for _ in range(3):
        module.zero_grad()
        weight.grad = None
        schedule.step(x, target=y)
        assert module.bias.grad is not None and weight.grad is not None
        seen.append((weight.grad.item(), module.bias.grad.clone()))
    for grad, bias in seen:
        assert grad == 2.0
        assert torch.equal(bias, seen[0][1])


def test_the_gradient_of_a_loss_is_the_same_in_every_step_whoever_keeps_or_changes_it() -> None:
    run_ranks(_train_a_loss_with_a_parameter, 1, "farandole")
