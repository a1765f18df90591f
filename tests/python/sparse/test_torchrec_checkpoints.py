"""Checkpoints of torchrec's models while batches are in flight."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint

from farandole.sparse import TrainPipelineSparseDist
from sparse.torchrec_needed import needs_torchrec
from support.processes import run_ranks
from support.recommenders import drain

pytestmark = needs_torchrec


def save_and_load(rank: int, world_size: int, seed: int, folder: str) -> None:
    import torchrec_models as models

    pick = random.Random(seed)
    for case in range(3):
        kind, number = models.random_kind(pick), pick.randint(2, 7)
        done = pick.randint(1, number - 1)
        print(f"seed {seed}: {kind}, after {done} of {number} batches")
        (model, optimizer), (other, other_optimizer) = (models.made(kind, has_dtensors=True) for _ in range(2))
        pipeline = TrainPipelineSparseDist(model, optimizer, models.CPU, strict=True)
        batches = iter(models.make_batches(kind, seed, number))
        for _ in range(done):
            pipeline.progress(batches)
        assert pipeline.in_flight > 0
        path = f"{folder}/{case}"
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=path)
        steps = copy.deepcopy(optimizer.state_dict())
        outputs = drain(pipeline, batches)
        with torch.no_grad():
            for part in other.parameters():
                part.zero_()
        state: dict[str, Any] = {"model": other.state_dict()}
        checkpoint.load(state, checkpoint_id=path)
        other.load_state_dict(state["model"])
        other_optimizer.load_state_dict(steps)
        again = TrainPipelineSparseDist(other, other_optimizer, models.CPU, strict=True)
        repeated = drain(again, iter(models.make_batches(kind, seed, number)[done:]))
        assert len(outputs) == number - done and all(map(torch.equal, outputs, repeated))
        theirs = dict(other.named_parameters())
        assert all(torch.equal(part, theirs[name]) for name, part in model.named_parameters())


@pytest.mark.parametrize("world_size", [2, 3])
def test_goes_on_from_a_checkpoint_as_without(world_size, tmp_path):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    run_ranks(save_and_load, world_size, "farandole", timeout=120, seed=seed, folder=str(tmp_path))
