"""Pipeline and data parallelism together: two stages, two replicas, gradients as in one process."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
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
