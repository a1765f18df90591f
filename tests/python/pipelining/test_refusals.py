"""What a constructor refuses on one rank reaches the others in their step, with rank and reason; then all can begin anew."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from farandole.pipelining import (
    PipelineScheduleMulti,
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipe,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
)
from pipelining.pipeline_support import BACKENDS
from support.devices import DEVICE
from support.processes import run_ranks

SOON = 20.0  # seconds; a group's timeout is many times that


def _stages(rank: int, indices: list[int], num_stages: int) -> list[PipelineStage]:
    return [PipelineStage(nn.Linear(4, 4), index, num_stages, DEVICE) for index in indices]


def _one(rank: int, **options: Any) -> ScheduleGPipe:
    return ScheduleGPipe(*_stages(rank, [rank], 2), 2, nn.MSELoss(), **options)


def _two(rank: int, count: int = 2) -> ScheduleInterleaved1F1B:
    return ScheduleInterleaved1F1B(_stages(rank, [rank, rank + 2], 4), count, nn.MSELoss())


def _from_csv(rank: int, text: str) -> PipelineScheduleMulti:
    path = Path(f"rank_{rank}.csv")
    path.write_text(text)
    schedule = PipelineScheduleMulti(_stages(rank, [rank], 2), 2, nn.MSELoss())
    schedule.load_csv(path)
    return schedule


_PLAN = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"

# What the others make, what one rank makes, and its error.
CASES: list[tuple[Callable[[int], Any], Callable[[int], Any], type[Exception], str]] = [
    (
        _one,
        lambda rank: ScheduleGPipe(*_stages(rank, [1 - rank], 2), 2, nn.MSELoss()),
        ValueError,
        "stage_index is {other}, expected {rank}: ScheduleGPipe runs that stage on rank {rank} of the group",
    ),
    (_one, lambda rank: _stages(rank, [2], 2), ValueError, "stage_index is 2, expected 0 to 1"),
    (_one, lambda rank: _one(rank, colour="red"), TypeError, "unexpected keyword argument 'colour'"),
    (_one, lambda rank: Schedule1F1B(*_stages(rank, [rank], 2), 0), ValueError, "n_microbatches is 0, expected an int"),
    (
        lambda rank: ScheduleDualPipe(_stages(rank, [rank, 3 - rank], 4), 4, nn.MSELoss()),
        lambda rank: ScheduleDualPipe(_stages(rank, [rank, 3 - rank], 4), 3, nn.MSELoss()),
        ValueError,
        "schedule DualPipe: numMicrobatches is 3",
    ),
    (
        _two,
        lambda rank: ScheduleInterleaved1F1B(_stages(rank, [2 * rank, 2 * rank + 1], 4), 2, nn.MSELoss()),
        ValueError,
        "expected [{rank}, {third}]",
    ),
    (
        lambda rank: _from_csv(rank, _PLAN),
        lambda rank: _from_csv(rank, _PLAN.replace("1B1", "1B7")),
        ValueError,
        "the plan has 8 microbatches, expected n_microbatches=2",
    ),
]


def _refuse_on_one_rank(rank: int, world_size: int, seed: int, folder: str) -> None:
    os.chdir(folder)
    rng = random.Random(seed)
    for number, (good, bad, kind, text) in enumerate(CASES):
        wrong = rng.randrange(world_size)
        expected = text.format(rank=wrong, other=1 - wrong, third=wrong + 2)
        where = f"seed {seed}, case {number}, rank {wrong} is wrong"
        start = time.monotonic()
        if rank == wrong:
            with pytest.raises(kind) as raised:
                bad(rank)
            assert expected in str(raised.value), where
        else:
            schedule = good(rank)
            with pytest.raises(RuntimeError) as met:
                schedule.step(torch.ones(4, 4), target=torch.ones(4, 4))
            assert f"the step cannot run: rank {wrong}: {kind.__name__}: " in str(met.value), (where, met.value)
            assert expected in str(met.value), (where, met.value)
        assert time.monotonic() - start < SOON, where
        losses: list[torch.Tensor] = []
        _one(rank).step(torch.ones(4, 4), target=torch.ones(4, 4), losses=losses)  # the group serves on
        assert len(losses) == (2 if rank == 1 else 0), where


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_one_rank_refuses_reaches_the_others(backend: str, tmp_path: Any) -> None:
    seed = random.SystemRandom().randrange(2**31)
    print("seed", seed)
    run_ranks(_refuse_on_one_rank, 2, backend, timeout=120, seed=seed, folder=str(tmp_path))
