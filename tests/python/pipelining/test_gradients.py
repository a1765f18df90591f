"""A pipeline trains as one process does: same losses, outputs and gradients, bit for bit."""

from __future__ import annotations

import copy
import random
import time

import pytest
import torch
from torch import nn

from farandole.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from pipelining.pipeline_support import BACKENDS, assert_same_gradients, random_stages, train_alone
from support.processes import run_ranks

CASES_PER_RUN = 6


def _train_random_models(rank: int, world_size: int, seed: int) -> int:
    for case in range(CASES_PER_RUN):
        rng = random.Random(seed + case)
        context = f"seed {seed + case}"
        stages = random_stages(rng, world_size)
        n_microbatches = rng.randint(1, 9)
        schedule_class = rng.choice([ScheduleGPipe, Schedule1F1B])
        scale = rng.random() < 0.7
        loss_fn = nn.MSELoss()
        schedule = schedule_class(
            PipelineStage(stages[rank], rank, world_size, "cpu"), n_microbatches, loss_fn, scale_grads=scale
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
    schedule = Schedule1F1B(PipelineStage(stages[rank], rank, world_size, "cpu"), 8, nn.MSELoss())
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
        schedule = ScheduleGPipe(PipelineStage(stages[rank], rank, world_size, "cpu"), 4, nn.MSELoss())
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
    schedule = Schedule1F1B(PipelineStage(stages[rank], rank, world_size, "cpu"), 3, nn.MSELoss())
    schedule.step(batch, target=target)
    first = [p.grad.clone() for p in stages[rank].parameters()]
    schedule.step(batch, target=target)
    for parameter, once in zip(stages[rank].parameters(), first, strict=True):
        assert torch.allclose(parameter.grad, 2 * once)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_two_steps_add_up(backend: str) -> None:
    run_ranks(_accumulate, 2, backend)
