"""Plans that are written as CSV here run in torch's own runtime, and train as one process does."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from farandole.pipelining import plan, schedule_names
from pipelining.pipeline_support import SINGLE, assert_same_gradients, random_stages, train_alone
from support.devices import DEVICE
from support.processes import run_ranks

# DualPipe has two copies of the model, which torch's plans have not.
LEFT_OUT = {"none", "DualPipe"}
if torch.__version__.startswith("2.11."):  # there a rank sends to itself where two stages meet on it, which gloo cannot
    LEFT_OUT |= {"ZBV", "V-Half", "V-Min", "DualPipeV"}
NAMES = [name for name in schedule_names() if name not in LEFT_OUT]
RANKS = 2


def _train_in_torch(rank: int, world_size: int, folder: str, seed: int, names: list[str]) -> None:
    from torch.distributed import pipelining as theirs
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    for name in names:
        rng = random.Random(f"{seed} {name}")
        num_stages = world_size * (1 if name in SINGLE else 2)
        n_microbatches = world_size * rng.randint(2, 4)
        owners = plan(name, num_stages, n_microbatches, num_ranks=world_size).rank_of_stage
        stages = random_stages(rng, num_stages, torch.double)
        mine: list[Any] = [
            theirs.PipelineStage(stages[i], i, num_stages, torch.device(DEVICE))
            for i, owner in enumerate(owners)
            if owner == rank
        ]
        schedule = _PipelineScheduleRuntime(mine, n_microbatches, nn.MSELoss())
        schedule._load_csv(f"{folder}/{name}.{n_microbatches}.csv", "compute_only")
        batch = torch.randn(2 * n_microbatches, stages[0][0].in_features, dtype=torch.double)
        with torch.no_grad():
            target = torch.randn_like(nn.Sequential(*stages)(batch))
        alone, _, _ = train_alone(copy.deepcopy(stages), nn.MSELoss(), batch, target, n_microbatches)
        given = [batch] if owners[0] == rank else []
        schedule.step(*given, **({"target": target} if owners[-1] == rank else {}))
        for index, owner in enumerate(owners):
            if owner == rank:
                assert_same_gradients(stages[index], alone[index], f"seed {seed}, {name}, stage {index}", 1e-9)


@pytest.mark.parametrize("names", [NAMES[::2], NAMES[1::2]], ids=" ".join)
def test_torch_runs_the_csv_of_every_schedule_of_one_model(names: list[str], tmp_path: Path) -> None:
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    for name in names:
        for n_microbatches in (2 * RANKS, 3 * RANKS, 4 * RANKS):
            made = plan(name, RANKS * (1 if name in SINGLE else 2), n_microbatches, num_ranks=RANKS)
            (tmp_path / f"{name}.{n_microbatches}.csv").write_text(made.to_csv())
    run_ranks(_train_in_torch, RANKS, "gloo", timeout=120, folder=str(tmp_path), seed=seed, names=names)
