"""Writes that no graph shows: of a dense module to the batch, of numpy, to tensors of the model that are no buffers."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from farandole.sparse import TrainPipelineSparseDist
from farandole.sparse._batch_paths import tensors_in
from support.devices import DEVICE, ON_CPU
from support.processes import run_ranks
from support.recommenders import Batch, Recommender, assert_same, drain, made, make_batches, plain_loop


class Shift(nn.Module):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids + 1


class ShiftOf(nn.Module):
    def forward(self, batch: Batch) -> torch.Tensor:
        return batch.ids + 1


class Writing(nn.Module):
    """Dense, and does something to the batch."""

    def __init__(self, write: Callable[[Batch], None]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.write = write

    def forward(self, batch: Batch) -> torch.Tensor:
        self.write(batch)
        return self.linear(batch.dense)


def _replace(batch: Batch) -> None:
    batch.ids = batch.ids // 2


class Model(Recommender):
    def __init__(self, write: Callable[[Batch], None], post: nn.Module | None) -> None:
        super().__init__(1)
        self.writing = Writing(write)
        self.post = post

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        dense = self.writing(batch)
        ids = batch.ids
        if isinstance(self.post, ShiftOf):
            ids = self.post(batch)
        elif self.post is not None:
            ids = self.post(ids)
        return self.score(torch.cat([self.tables[0](ids), dense], 1), batch.labels)


CASES: dict[str, tuple[Callable[[Batch], object], type[nn.Module] | None, str]] = {
    "before a module": (
        lambda batch: batch.ids.floor_divide_(2),
        Shift,
        "^post has run ahead of forward, and is called",
    ),
    "before one that takes the batch": (lambda batch: batch.ids.floor_divide_(2), ShiftOf, "^post has run ahead"),
    "of another tensor": (_replace, ShiftOf, "^post has run ahead"),
    "to data": (lambda batch: batch.ids.data.floor_divide_(2), None, r"inputs of tables\.0 have been written to since"),
}
CASES["to data, before a module"] = (lambda batch: batch.ids.data.floor_divide_(2), Shift, "^post has run ahead")
if ON_CPU:
    CASES["by numpy"] = (
        lambda batch: batch.ids.numpy().fill(3),
        None,
        r"inputs of tables\.0 have been written to since",
    )


def write(rank: int, world_size: int, case: str) -> None:
    how, post, match = CASES[case]
    model, optimizer = made(Model(how, None if post is None else post()).to(DEVICE))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
    batches = iter(make_batches(1, 3))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=match):
            pipeline.progress(batches)


@pytest.mark.parametrize("case", CASES)
def test_what_a_module_writes_before_inputs_are_taken_is_an_error(case):
    run_ranks(write, 2, "farandole", case=case)


class Halved(nn.Module):
    """In place."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids.floor_divide_(2)


class InPlace(Recommender):
    """A module without parameters writes to what it is given: a part of the batch, or something new."""

    def __init__(self, is_new: bool, reads: str) -> None:
        super().__init__(1)
        self.halved = Halved()
        self.is_new, self.reads = is_new, reads

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        ids = batch.ids.clone() if self.is_new else batch.ids
        before = ids.abs()[0] if self.reads == "before" else 0
        rows = self.tables[0](self.halved(ids))
        after = ids.abs()[0] if self.reads == "after" else 0
        added = (before + after) * torch.ones_like(batch.labels)
        return self.score(torch.cat([rows, batch.dense + added.unsqueeze(1)], 1), batch.labels)


def write_in_place(rank: int, world_size: int) -> None:
    for is_new in (False, True):
        for reads in ("nowhere", "before", "after"):
            (model, optimizer), (plain, plain_optimizer) = (made(InPlace(is_new, reads)) for _ in range(2))
            pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
            batches, others = make_batches(3, 5), make_batches(3, 5)
            if reads == ("after" if is_new else "before"):
                with pytest.raises(
                    RuntimeError, match=r"^halved, which runs ahead of forward, writes in place to what"
                ):
                    pipeline.progress(iter(batches))
            else:
                outputs = drain(pipeline, iter(batches))
                assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, others))), (is_new, reads)
                assert_same(model, plain)


def test_a_module_ahead_may_write_to_what_nobody_reads_in_between():
    run_ranks(write_in_place, 2, "farandole")


class Counting(Recommender):
    """In tensors that are no buffers, as settings, or in a list."""

    def __init__(self, way: str) -> None:
        super().__init__(1)
        self.way = way
        self.steps = torch.zeros((), dtype=torch.int64, device=DEVICE)
        self.several = [torch.zeros((), dtype=torch.int64, device=DEVICE)]

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        if self.way == "operator":
            self.steps += 1
        elif self.way == "method":
            self.steps.add_(1)
        else:
            self.several[0].add_(1)
        dense = batch.dense * (self.steps + self.several[0])
        return self.score(torch.cat([self.tables[0](batch.ids), dense], 1), batch.labels)


def count(rank: int, world_size: int) -> None:
    for way in ("operator", "method", "in a list"):
        (model, optimizer), (plain, plain_optimizer) = made(Counting(way)), made(Counting(way))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
            batches = make_batches(3, 5)
            outputs = drain(pipeline, iter(batches))
        said = [str(warning.message) for warning in caught if "cannot trace" in str(warning.message)]
        assert len(said) == (way == "in a list") and all("writes to 'several' in place" in text for text in said)
        assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, batches)))
        assert_same(model, plain)
        assert (model.module.steps, model.module.several) == (plain.module.steps, plain.module.several)
        assert pipeline.explain().startswith("tables.0: pipelined")


def test_tracing_counts_nothing():
    run_ranks(count, 2, "farandole")


class Offset(Recommender):
    """Adds what others may change between steps, and fx takes the value of for settled."""

    def __init__(self) -> None:
        super().__init__(1)
        self.offset = torch.zeros((), dtype=torch.int64, device=DEVICE)
        self.shifts = [0, 0]

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        ids = batch.ids + self.offset * 2 + self.shifts[1]
        return self.score(torch.cat([self.tables[0](ids), batch.dense], 1), batch.labels)


def change(rank: int, world_size: int, name: str) -> None:
    model, optimizer = made(Offset())
    model.eval()  # no backward, in which the first to fail would leave the others
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
    batches: Any = iter(make_batches(3, 6))
    for _ in range(3):
        pipeline.progress(batches)
    if name == "offset":
        model.module.offset.add_(1)
    else:
        model.module.shifts[1] = 1
    told = rf"^tables\.0 is called with other inputs.* '{name}', which has changed since the last forward, is no part"
    with pytest.raises(RuntimeError, match=told):
        pipeline.progress(batches)


@pytest.mark.parametrize("name", ["offset", "shifts"])
def test_a_setting_that_others_change_between_steps_is_named(name):
    run_ranks(change, 2, "farandole", name=name)


def test_tensors_between_constants_are_looked_at():
    ids = torch.ones(2)
    assert [tensor for _, _, tensor in tensors_in(((None, ids, 3), {"keys": ["a", "b"]}))] == [ids]
