"""When buckets are reduced beside a pipeline whose backwards are taken apart: after what fills them, before the end."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS

from farandole import pipelining
from farandole.ddp import DistributedDataParallel
from support.devices import DEVICE, seeded
from support.processes import run_ranks

RANKS, REPLICAS, MICROBATCHES, LAYERS, WIDTH = 2, 2, 4, 3, 32
# By schedule: the stages of each pipeline rank.
SCHEDULES = {
    "InterleavedZeroBubble": [[0, 2], [1, 3]],
    "ZBVZeroBubble": [[0, 3], [1, 2]],
    "Interleaved1F1B": [[0, 2], [1, 3]],
}


def _stage(index: int) -> torch.nn.Module:
    torch.manual_seed(index)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def _backwards(trace: list[tuple[str, float, float]], stage: int) -> list[tuple[float, float]]:
    """What fills the gradients of a stage, in order: its W, or B where it is not split."""
    filling = re.compile(rf"{stage}[WB]\d+$")
    return [(start, end) for action, start, end in trace if filling.match(action)]


def _runs(rank: int, world_size: int, name: str) -> tuple[bool, dict[int, Any]]:
    pp_rank, replica = rank % RANKS, rank // RANKS
    pipelines = [dist.new_group([RANKS * r + p for p in range(RANKS)]) for r in range(REPLICAS)]
    replicas = [dist.new_group([RANKS * r + p for r in range(REPLICAS)]) for p in range(RANKS)]
    mine = SCHEDULES[name][pp_rank]
    bucket_size = WIDTH * WIDTH + WIDTH  # one for each layer
    models = [
        DistributedDataParallel(_stage(stage), process_group=replicas[pp_rank], bucket_size=bucket_size)
        for stage in mine
    ]
    stages = [
        pipelining.PipelineStage(model, stage, 4, DEVICE, group=pipelines[replica])
        for model, stage in zip(models, mine, strict=True)
    ]
    schedule = getattr(pipelining, f"Schedule{name}")(stages, MICROBATCHES, torch.nn.MSELoss())
    x = torch.randn(2 * MICROBATCHES, WIDTH, generator=seeded(replica))

    def step() -> None:
        for model in models:
            model.zero_grad()
        schedule.step(x, target=x)

    step()  # the order of buckets is known after it
    with models[0].record_timeline() as first, models[1].record_timeline() as second:
        step()
    executor = schedule._last_run.executor  # whose times are the host's, as the timelines' are
    began = executor.last_step_began
    trace = [(action, start + began, end + began) for action, start, end in executor.last_step_trace()]
    seen: dict[int, Any] = {}
    for index, timeline in enumerate((first, second)):
        stage, other = mine[index], mine[1 - index]
        reductions = [(event.name, event.start) for event in timeline.events() if event.kind == "reduction"]
        ready = [event.start for event in timeline.events() if event.kind == "ready"]
        rest = [end for action, _, end in trace if re.match(rf"{other}[FBIW]\d", action)]
        seen[stage] = (reductions, ready, _backwards(trace, stage), max(rest))
    splits = any(re.match(r"\dW\d", action) for action, _, _ in trace)
    return splits, seen


@pytest.mark.sample(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", list(SCHEDULES))
def test_a_bucket_is_reduced_after_the_last_action_that_fills_it_and_not_later(backend, name):
    results = run_ranks(_runs, RANKS * REPLICAS, backend, timeout=60, name=name)
    for rank, (splits, seen) in enumerate(results):
        assert splits == (name != "Interleaved1F1B"), name
        ends = {}
        for stage, (reductions, ready, backwards, other_end) in seen.items():
            where = f"rank {rank} stage {stage}: {reductions} {backwards} {other_end}"
            assert sorted(bucket for bucket, _ in reductions) == [f"bucket {i}" for i in range(LAYERS)], where
            assert len(backwards) == MICROBATCHES, where
            last_start, last_end = backwards[-1]
            # Each of them within the last action, as its layer's gradient comes: not before, not at the step's end.
            assert all(last_start <= start <= last_end for start in ready), where
            assert all(last_start <= start <= last_end for _, start in reductions), where
            assert min(start for _, start in reductions) < max(ready), where  # while others are still to come
            ends[stage] = (last_end, max(start for _, start in reductions), other_end)
        # Of the stage that is done first, while the rank still works on the other one.
        last_end, reduced, other_end = min(ends.values())
        assert reduced < other_end, (rank, ends)
        assert last_end < other_end, (rank, ends)
