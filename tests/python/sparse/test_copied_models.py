"""Copies of a model that a pipeline is attached to, as those of the best one so far, or of its average: models as ever."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from farandole.sparse import TrainPipelineSparseDist
from support.devices import DEVICE, seeded
from support.processes import run_ranks
from support.recommenders import Request, drain

Batch = dict[str, torch.Tensor]
ROWS, SIZE = 20, 6


class Table(nn.Module):
    """On one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(ROWS))

    def create_context(self) -> None:
        return None

    def input_dist(self, context: None, ids: torch.Tensor) -> Request:
        return Request(lambda: Request(lambda: ids))

    def compute_and_output_dist(self, context: None, ids: torch.Tensor) -> torch.Tensor:
        return self.rows[ids]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.compute_and_output_dist(None, ids)


class Turning(nn.Module):
    """Runs ahead, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (ids + self.calls) % ROWS


class Model(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.turning, self.table = Turning(), Table()

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.table(self.turning(batch["ids"]))
        return (scores - batch["labels"]).square(), scores.detach()


def saved_and_loaded(model: nn.Module) -> Any:
    memory = io.BytesIO()
    torch.save(model, memory)
    memory.seek(0)
    return torch.load(memory, weights_only=False)


HOWS: dict[str, Callable[[nn.Module], Any]] = {
    "deepcopy": copy.deepcopy,
    "average": lambda model: AveragedModel(model).module,
    "save": saved_and_loaded,
    "a copy of a copy": lambda model: copy.deepcopy(saved_and_loaded(model)),
}


def made_batches(seed: int, number: int) -> list[Batch]:
    generator = seeded(seed)
    return [
        {
            "ids": torch.randint(0, ROWS, (SIZE,), generator=generator),
            "labels": torch.rand(SIZE, generator=generator),
        }
        for _ in range(number)
    ]


def copy_and_train(rank: int, world_size: int, how: str, seed: int) -> None:
    model = Model(seed)
    pipeline = TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), lr=0.5), DEVICE, strict=True)
    batches = iter(made_batches(seed, 8))
    for _ in range(2):
        pipeline.progress(batches)
    copied, alone = HOWS[how](model), Model(seed)
    alone.load_state_dict(model.state_dict())
    kept = copy.deepcopy(model.state_dict())
    given = made_batches(seed + 1, 3)
    with torch.no_grad():
        for batch in given:  # has nothing of the model's
            assert torch.equal(copied(batch)[1], alone(batch)[1]), f"seed {seed}"
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items()), f"seed {seed}"
    outputs = drain(pipeline, batches)
    theirs = TrainPipelineSparseDist(copied, torch.optim.SGD(copied.parameters(), lr=0.5), DEVICE, strict=True)
    again = TrainPipelineSparseDist(alone, torch.optim.SGD(alone.parameters(), lr=0.5), DEVICE, strict=True)
    expected = drain(again, iter(given))
    assert all(map(torch.equal, drain(theirs, iter(given)), expected)) and len(expected) == 3, f"seed {seed}"
    theirs.detach()
    with torch.no_grad():
        assert torch.equal(copied(given[0])[1], alone(given[0])[1]), f"seed {seed}"
    assert len(outputs) == 6
    assert copied.table.rows is not model.table.rows


@pytest.mark.parametrize("how", HOWS)
def test_a_copy_of_an_attached_model_computes_with_what_is_its_own(how):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    run_ranks(copy_and_train, 1, "farandole", how=how, seed=seed)
