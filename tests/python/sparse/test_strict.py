"""strict=True of one pipeline of several of a model, on some ranks only: all are told."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from farandole.sparse import EvalPipelineSparseDist, TrainPipelineSparseDist
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import Batch, Recommender, assert_same, drain, made, make_batches, on_device, plain_loop


class Late(Recommender):
    """The ids of its second table are made with a parameter."""

    def __init__(self) -> None:
        super().__init__(1, tables=2)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        late = batch.ids + self.dense[0].weight.detach().abs().sum().long() * 0
        rows = [self.tables[0](batch.ids), self.tables[1](late)]
        return self.score(torch.cat([*rows, batch.dense], 1), batch.labels)


def ask_late(rank: int, world_size: int, ranks: list[int], tracing: str | None) -> None:
    """While batches of the first one are in flight, which goes on."""
    (model, optimizer), (plain, plain_optimizer) = made(Late()), made(Late())
    options: dict[str, Any] = {"tracing": tracing}
    batches, others = make_batches(1, 6), make_batches(2, 3)
    first = TrainPipelineSparseDist(model, optimizer, DEVICE, **options)
    iterator = iter(batches)
    outputs = [first.progress(iterator) for _ in range(2)]
    asked = f" (strict=True on rank {', '.join(map(str, ranks))})" if len(ranks) < world_size else ""
    told = re.escape(f"sharded modules cannot be pipelined{asked}\ntables.1: not pipelined: ")
    second = EvalPipelineSparseDist(model, optimizer, DEVICE, strict=rank in ranks, **options)
    for call in (lambda: second.progress(iter(others)), second.explain):
        with pytest.raises(ValueError, match=told):
            call()
    third = EvalPipelineSparseDist(model, optimizer, DEVICE, **options)
    model.eval()
    with torch.no_grad():
        expected = [model(on_device(batch))[1] for batch in others]
    assert all(map(torch.equal, drain(third, iter(others)), expected))
    model.train()
    outputs += drain(first, iterator)
    assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, batches)))
    assert_same(model, plain)


@pytest.mark.filterwarnings("ignore:sharded modules exchange their inputs")
@pytest.mark.parametrize("tracing", ["fx", "hooks"])
@pytest.mark.parametrize("ranks", [[1], [0, 1]])
def test_a_later_pipeline_that_is_strict_on_some_ranks_is_refused_on_all(ranks, tracing):
    run_ranks(ask_late, 2, "farandole", timeout=60, ranks=ranks, tracing=tracing)


def ask_first(rank: int, world_size: int) -> None:
    model, optimizer = made(Late())
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=rank == 1)
    with pytest.raises(ValueError, match=r"cannot be pipelined \(strict=True on rank 1\)\ntables\.1: not pipelined"):
        pipeline.progress(iter(make_batches(1, 3)))


def test_the_first_pipeline_says_who_is_strict():
    run_ranks(ask_first, 2, "farandole", timeout=60)


def be_strict_together(rank: int, world_size: int) -> None:
    """Where all are pipelined it is no matter who asks."""
    (model, optimizer), (plain, plain_optimizer) = made(), made()
    batches = make_batches(1, 6)
    first = TrainPipelineSparseDist(model, optimizer, DEVICE)
    iterator = iter(batches)
    outputs = [first.progress(iterator) for _ in range(3)]
    second = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=rank == 0)
    assert second.explain() == "tables.0: pipelined"
    outputs += drain(first, iterator)
    assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, batches)))
    assert_same(model, plain)


def test_it_is_no_matter_where_all_are_pipelined():
    run_ranks(be_strict_together, 2, "farandole", timeout=60)
