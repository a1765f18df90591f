"""Batches whose inputs are exchanged a second time, since a module that had run ahead was changed: it is told."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from farandole.sparse import TrainPipelineSparseDist
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import ROWS, Batch, Recommender, assert_same, drain, made, make_batches, plain_loop


class Salted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.salt, self.unused = 3, 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (ids + self.salt if self.training else ids) % ROWS


class Model(Recommender):
    def __init__(self) -> None:
        super().__init__(1)
        self.salted = Salted()

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.score(torch.cat([self.tables[0](self.salted(batch.ids)), batch.dense], 1), batch.labels)


def told_of(caught: list[Any]) -> list[Any]:
    return [warning for warning in caught if "exchanges its inputs again" in str(warning.message)]


def salt_every_second(rank: int, world_size: int, ranks: tuple[int, ...]) -> None:
    """Before every second step; what is changed gives other inputs on these ranks."""
    (model, optimizer), (plain, plain_optimizer) = made(Model()), made(Model())
    outputs, expected, batches = [], [], make_batches(1, 8)
    iterator = iter(batches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
        for number, batch in enumerate(batches):
            for each in (model, plain) if number % 2 == 0 else ():
                setattr(each.module.salted, "salt" if rank in ranks else "unused", 10 + number)
            outputs.append(pipeline.progress(iterator))
            expected += plain_loop(plain, plain_optimizer, [batch])
    assert all(map(torch.equal, outputs, expected))
    assert_same(model, plain)
    [warning] = told_of(caught)
    why = "since 'salted' was changed after it had run ahead"
    assert str(warning.message).startswith(f"batch 2 exchanges its inputs again, in its forward, {why}: ")
    assert warning.filename == __file__
    assert pipeline.explain().splitlines() == [
        "tables.0: pipelined",
        f"3 batches have exchanged inputs again, in the forward, {why}",
    ]


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
def test_a_change_before_every_second_step_is_told_once_and_counted(ranks):
    run_ranks(salt_every_second, 2, "farandole", ranks=ranks)


def test_it_is_told_to_a_single_rank():
    run_ranks(salt_every_second, 1, "farandole", ranks=(0,))


def change_nothing_given(rank: int, world_size: int) -> None:
    model, optimizer = made(Model())
    iterator = iter(make_batches(1, 6))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
        for number in range(6):
            model.module.salted.unused = number
            pipeline.progress(iterator)
    assert pipeline.explain() == "tables.0: pipelined"


def test_a_change_that_gives_no_other_inputs_is_not_told():
    run_ranks(change_nothing_given, 2, "farandole")


def change_the_mode(rank: int, world_size: int) -> None:
    model, optimizer = made(Model())
    iterator = iter(make_batches(1, 6))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
    pipeline.progress(iterator)
    model.eval()
    why = "since the mode of the model was changed after 'salted' had run ahead"
    with pytest.warns(UserWarning, match=f"batch 1 exchanges its inputs again, in its forward, {why}"):
        pipeline.progress(iterator)
    assert len(drain(pipeline, iterator)) == 4
    assert pipeline.explain().splitlines()[1:] == [f"1 batch has exchanged inputs again, in the forward, {why}"]


def test_a_change_of_the_mode_is_told_as_that():
    run_ranks(change_the_mode, 2, "farandole")
