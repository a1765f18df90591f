"""Batches with torchrec's to_proxy(): a forward may decide by what that leaves as it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from farandole.sparse import TrainPipelineSparseDist
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import Batch, Recommender, assert_same, drain, made, make_batches, plain_loop


@dataclass
class WithShift(Batch):
    shift: torch.Tensor | None = None

    def to_proxy(self) -> WithShift:
        self.ids = self.dense = self.labels = torch.fx.PH
        return self


class Shifted(Recommender):
    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids = batch.ids + 1 if batch.shift is None else batch.ids + batch.shift
        return self.score(torch.cat([self.tables[0](ids), batch.dense], 1), batch.labels)


def with_shifts(batches: list[Batch]) -> list[WithShift]:
    return [WithShift(batch.ids, batch.dense, batch.labels) for batch in batches]


def train(rank: int, world_size: int) -> None:
    (model, optimizer), (plain, plain_optimizer) = made(Shifted()), made(Shifted())
    batches = with_shifts(make_batches(1, 5))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True, tracing="fx", example_batch=batches[0])
    outputs = drain(pipeline, iter(batches))
    assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, batches)))
    assert_same(model, plain)
    assert pipeline.explain() == "tables.0: pipelined" and isinstance(batches[0].ids, torch.Tensor)


def test_a_forward_asks_for_parts_that_are_none():
    run_ranks(train, 2, "farandole")


def train_with_another(rank: int, world_size: int) -> None:
    """With what the example does not have: in the first forward of its kind."""
    model, optimizer = made(Shifted())
    model.eval()  # no backward, in which the first to fail would leave the others
    batches = with_shifts(make_batches(1, 5))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True, example_batch=batches[0])
    batches[2].shift = torch.tensor(5, device=DEVICE)
    iterator = iter(batches)
    for _ in range(2):
        pipeline.progress(iterator)
    with pytest.raises(RuntimeError, match=r"called with other inputs .* give such a batch as example_batch"):
        pipeline.progress(iterator)
    assert len(drain(pipeline, iterator)) == 2


def test_a_batch_that_is_not_like_the_example_is_an_error():
    run_ranks(train_with_another, 2, "farandole")


def refuse(rank: int, world_size: int) -> None:
    model, optimizer = made(Shifted())
    [batch] = make_batches(1, 1)
    with pytest.raises(TypeError, match=r"example_batch is a Batch: expected a batch with to_proxy\(\)"):
        TrainPipelineSparseDist(model, optimizer, DEVICE, example_batch=batch)
    with pytest.raises(ValueError, match=r'example_batch with tracing="hooks": expected None'):
        TrainPipelineSparseDist(model, optimizer, DEVICE, tracing="hooks", example_batch=with_shifts([batch])[0])


def test_what_is_no_example_is_refused():
    run_ranks(refuse, 1, "farandole")
