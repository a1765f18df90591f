"""Batches whose tensors are parts of a larger one, each write to which torch counts for all of them: as the plain loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from farandole.sparse import TrainPipelineSparseDist
from farandole.sparse._given_call import GivenCall
from farandole.sparse._input_writes import InputWrites
from sparse.torchrec_needed import needs_torchrec
from support.devices import DEVICE, only_on_cpu
from support.processes import run_ranks
from support.recommenders import (
    DENSE,
    ROWS,
    Batch,
    Recommender,
    assert_same,
    drain,
    made,
    make_batches,
    plain_loop,
)

pytestmark = only_on_cpu("a copy to a GPU is memory of its own")

NUMBER = 21  # past the one that is looked at by its values


class Shift(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids + 1) % ROWS


class Model(Recommender):
    """Writes in place to another part of the batch; with a module ahead of the table, or without."""

    def __init__(self, has_module: bool) -> None:
        super().__init__(1)
        self.shift = Shift() if has_module else nn.Identity()

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        batch.dense.clamp_(-1, 1)
        ids = self.shift(batch.ids) if isinstance(self.shift, Shift) else batch.ids
        rows = self.tables[0](ids)
        return self.score(torch.cat([rows, batch.dense.mul_(2)], 1), batch.labels)


def in_a_ring(batches: list[Batch]) -> Iterator[Batch]:
    """The ids of each in one of four slots of a tensor, filled in turn."""
    ring = torch.empty(4, *batches[0].ids.shape, dtype=torch.int64)
    for number, batch in enumerate(batches):
        slot = ring[number % 4]
        slot.copy_(batch.ids)
        yield Batch(slot, batch.dense, batch.labels)


def packed(batches: list[Batch]) -> Iterator[Batch]:
    """Each in the bytes of one buffer, as a loader that copies nothing has them."""
    for batch in batches:
        samples = len(batch.labels)
        most = 8 * batch.ids.numel()
        buffer = torch.empty(most + 4 * samples * (DENSE + 1), dtype=torch.uint8)
        ids = buffer[:most].view(torch.int64).view_as(batch.ids)
        dense = buffer[most : most + 4 * samples * DENSE].view(torch.float32).view(samples, DENSE)
        labels = buffer[most + 4 * samples * DENSE :].view(torch.float32)
        yield Batch(ids.copy_(batch.ids), dense.copy_(batch.dense), labels.copy_(batch.labels))


LOADERS: dict[str, Callable[[list[Batch]], Iterator[Batch]]] = {"ring": in_a_ring, "packed": packed}
OPTIONS: dict[str, dict[str, Any]] = {
    "fx": {},
    "hooks": {"tracing": "hooks"},
    "hooks and threads": {"tracing": "hooks", "load_on_thread": True, "dist_on_thread": True},
    "threads": {"load_on_thread": True, "dist_on_thread": True},
}


def train(rank: int, world_size: int, loader: str, way: str, has_module: bool) -> None:
    (model, optimizer), (plain, plain_optimizer) = made(Model(has_module)), made(Model(has_module))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, **OPTIONS[way])
    outputs = drain(pipeline, LOADERS[loader](make_batches(1, NUMBER, (4, 5))))
    expected = plain_loop(plain, plain_optimizer, make_batches(1, NUMBER, (4, 5)))
    assert len(outputs) == NUMBER and all(map(torch.equal, outputs, expected))
    assert_same(model, plain)
    assert pipeline.explain() == "tables.0: pipelined"


@pytest.mark.parametrize("way", OPTIONS)
@pytest.mark.parametrize("loader", LOADERS)
def test_writes_to_other_parts_are_none_to_what_a_table_is_given(loader, way):
    run_ranks(train, 2, "farandole", loader=loader, way=way, has_module=False)


@pytest.mark.parametrize("way", ["fx", "threads"])
@pytest.mark.parametrize("loader", LOADERS)
def test_writes_to_other_parts_are_none_to_what_a_module_ahead_is_given(loader, way):
    run_ranks(train, 2, "farandole", loader=loader, way=way, has_module=True)


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DENSE, DENSE)

    def forward(self, batch: Batch) -> torch.Tensor:
        batch.ids.floor_divide_(2)
        return self.linear(batch.dense)


class WritesToIds(Model):
    """In a dense module, which no graph shows."""

    def __init__(self, has_module: bool) -> None:
        super().__init__(has_module)
        self.writing = Writing()

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        dense = self.writing(batch)
        ids = self.shift(batch.ids) if isinstance(self.shift, Shift) else batch.ids
        return self.score(torch.cat([self.tables[0](ids), dense], 1), batch.labels)


def write(rank: int, world_size: int, loader: str, has_module: bool) -> None:
    model, optimizer = made(WritesToIds(has_module))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    batches = LOADERS[loader](make_batches(1, 6, (4, 5)))
    told = "^shift has run ahead" if has_module else r"inputs of tables\.0 have been written to since"
    for _ in range(4):
        with pytest.raises(RuntimeError, match=told):
            pipeline.progress(batches)


@pytest.mark.parametrize("has_module", [False, True])
@pytest.mark.parametrize("loader", LOADERS)
def test_a_write_to_the_very_part_is_an_error(loader, has_module):
    run_ranks(write, 2, "farandole", loader=loader, has_module=has_module)


def test_nothing_is_copied_of_tensors_that_are_all_of_their_memory():
    whole, slots = torch.arange(6), torch.arange(12).view(2, 6)
    given = GivenCall((whole, slots[0]), {})
    given.note()
    assert len(given.tensors()) == 3
    assert [copied is None for copied in InputWrites([whole, slots[0]]).copies] == [False, True]  # from the last one on
    assert not InputWrites([slots[0]], may_be_others=True).copies


def train_torchrecs(rank: int, world_size: int) -> None:
    import torchrec_models as models
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    kind = models.Kind(("table", "row"), (), "weighted", False, False, 5)
    (model, optimizer), (plain, plain_optimizer) = models.made(kind), models.made(kind)
    plain.load_state_dict(model.state_dict())

    def in_slots() -> Iterator[Any]:
        slots: dict[str, torch.Tensor] = {
            name: torch.empty(4, 1000, dtype=torch.float32 if name == "weights" else torch.int64)
            for name in ("values", "lengths", "weights")
        }
        for number, batch in enumerate(models.make_batches(kind, 1, 7)):
            features = batch.second
            parts = {}
            for name, memory in slots.items():
                value = getattr(features, name)()
                parts[name] = memory[number % 4, : len(value)].copy_(value)
            batch.second = KeyedJaggedTensor(features.keys(), **parts)
            yield batch

    pipeline = TrainPipelineSparseDist(model, optimizer, models.CPU, strict=True)
    outputs = drain(pipeline, in_slots())
    expected = plain_loop(plain, plain_optimizer, models.make_batches(kind, 1, 7))
    assert len(outputs) == 7 and all(map(torch.equal, outputs, expected))
    theirs = models.weights(plain)
    assert all(torch.equal(value, theirs[name]) for name, value in models.weights(model).items())


@needs_torchrec[0]
def test_features_of_torchrec_in_a_ring():
    run_ranks(train_torchrecs, 2, "farandole", timeout=120)
