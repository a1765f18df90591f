"""Pipeline and data parallelism together: two stages, two replicas, gradients as in one process."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleZBH1, ScheduleZBH2
from pipelining.pipeline_support import BACKENDS, random_stages, train_alone
from support.processes import run_ranks

STAGES, REPLICAS = 2, 2


def _wrap(kind: str, module: nn.Module, group: dist.ProcessGroup) -> nn.Module:
    if kind == "torch":
        return nn.parallel.DistributedDataParallel(module, process_group=group)
    from farandole.ddp import DistributedDataParallel

    return DistributedDataParallel(module, process_group=group)


def _train_two_by_two(rank: int, world_size: int, kind: str) -> None:
    stage_index, replica = rank % STAGES, rank // STAGES
    pipelines = [dist.new_group([r * STAGES + s for s in range(STAGES)]) for r in range(REPLICAS)]
    replicas = [dist.new_group([r * STAGES + s for r in range(REPLICAS)]) for s in range(STAGES)]
    for seed in range(3):
        rng = random.Random(seed)
        stages = random_stages(rng, STAGES)
        n_microbatches = rng.randint(1, 5)
        batches = torch.randn(REPLICAS, 2 * n_microbatches + 1, stages[0][0].in_features)
        with torch.no_grad():
            targets = torch.randn_like(nn.Sequential(*stages)(batches))
        expected = [
            train_alone(stages, nn.MSELoss(), batches[r], targets[r], n_microbatches)[0][stage_index]
            for r in range(REPLICAS)
        ]
        wrapped = _wrap(kind, stages[stage_index], replicas[stage_index])
        stage = PipelineStage(wrapped, stage_index, STAGES, "cpu", group=pipelines[replica])
        schedule = rng.choice([ScheduleGPipe, Schedule1F1B])(stage, n_microbatches, nn.MSELoss())
        for step in range(3):
            wrapped.zero_grad()
            schedule.step(batches[replica], target=targets[replica])
            triples = zip(wrapped.parameters(), *(replica.parameters() for replica in expected), strict=True)
            for parameter, first, second in triples:
                mean = (first.grad + second.grad) / 2
                assert torch.allclose(parameter.grad, mean, rtol=1e-5, atol=1e-7), f"seed {seed}, step {step}"


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", ["torch", "farandole"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_replicas_reduce_once_per_step_at_the_last_backward(backend: str, kind: str) -> None:
    run_ranks(_train_two_by_two, STAGES * REPLICAS, backend, kind=kind)


def _sequence_number(group: dist.ProcessGroup) -> int:
    return group._get_sequence_number_for_group()  # of its collectives


def _count_reductions(rank: int, world_size: int, kind: str) -> None:
    stage_index, replica = rank % STAGES, rank // STAGES
    pipelines = [dist.new_group([r * STAGES + s for s in range(STAGES)]) for r in range(REPLICAS)]
    replicas = [dist.new_group([r * STAGES + s for r in range(REPLICAS)]) for s in range(STAGES)]
    mine = replicas[stage_index]
    expected = 1 if kind == "torch" else 2  # farandole's replicas also tell each other how their backward ended
    for seed, schedule_class in enumerate((ScheduleGPipe, Schedule1F1B, ScheduleZBH1, ScheduleZBH2)):
        rng = random.Random(seed)
        stages = random_stages(rng, STAGES)
        batches = torch.randn(REPLICAS, 8, stages[0][0].in_features)
        with torch.no_grad():
            targets = torch.randn_like(nn.Sequential(*stages)(batches))
        alone = [train_alone(stages, nn.MSELoss(), batches[r], targets[r], 4)[0][stage_index] for r in range(REPLICAS)]
        wrapped = _wrap(kind, stages[stage_index], mine)
        stage = PipelineStage(wrapped, stage_index, STAGES, "cpu", group=pipelines[replica])
        schedule = schedule_class(stage, 4, nn.MSELoss())

        def step(finalize: bool, schedule=schedule, batches=batches, targets=targets) -> int:
            before = _sequence_number(mine)
            schedule.step(batches[replica], target=targets[replica], finalize_gradients=finalize)
            return _sequence_number(mine) - before

        def gradients_are(factor: float, replicas: list[nn.Module], wrapped=wrapped) -> bool:
            pairs = zip(wrapped.parameters(), *(one.parameters() for one in replicas), strict=True)
            return all(
                torch.allclose(p.grad, factor * sum(q.grad for q in qs) / len(qs), rtol=1e-5, atol=1e-7)
                for p, *qs in pairs
            )

        for _ in range(2):  # torch's wrapper sorts its buckets anew after its first reduction
            step(True)
        where = f"{kind}, {schedule_class.__name__}"
        for _ in range(2):
            wrapped.zero_grad()
            assert step(True) == expected, f"{where}: the stage has one bucket, four microbatches"
            assert gradients_are(1, alone), where
        wrapped.zero_grad()
        assert [step(False), step(False)] == [0, 0], where
        assert gradients_are(2, [alone[replica]]), f"{where}: this replica's own, of two steps"
        assert step(True) == expected, where
        assert gradients_are(3, alone), f"{where}: those of three steps"


@pytest.mark.parametrize("kind", ["torch", "farandole"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_has_one_reduction_however_many_microbatches_and_none_where_none_is_asked_for(
    backend: str, kind: str
) -> None:
    run_ranks(_count_reductions, STAGES * REPLICAS, backend, timeout=120, kind=kind)
