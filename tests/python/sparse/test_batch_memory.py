"""A batch is gone, as far as the pipeline is concerned, before the backward of its step, when memory is short."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_prefetch import CachedRecommender

from farandole.sparse import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import Batch, Recommender, drain, made, make_batches

KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "base": (TrainPipelineBase, {}),
    "sparse": (TrainPipelineSparseDist, {"tracing": "fx", "grad_accum": 2}),
    "hooks": (TrainPipelineSparseDist, {"tracing": "hooks"}),
    "prefetch": (PrefetchTrainPipelineSparseDist, {}),
}


class Held(Batch):
    def to(self, device: torch.device, non_blocking: bool = False) -> Held:
        return Held(*(part.to(device, non_blocking=non_blocking) for part in (self.ids, self.dense, self.labels)))


def loader(seed: int, number: int) -> Iterator[Held]:
    for batch in make_batches(seed, number):
        yield Held(batch.ids.clone(), batch.dense, batch.labels)


def let_go(rank: int, world_size: int, kind: str, threads: bool) -> None:
    make, options = KINDS[kind]
    model, optimizer = made(CachedRecommender(1) if kind == "prefetch" else Recommender(1))
    gone: list[bool] = []

    def forward(batch: Held) -> tuple[torch.Tensor, torch.Tensor]:
        losses, output = model(batch)
        whole, ids = weakref.ref(batch), weakref.ref(batch.ids)

        losses.register_hook(lambda _: gone.append(whole() is None and ids() is None))
        return losses, output

    pipeline = make(model, optimizer, DEVICE, load_on_thread=threads, custom_model_fwd=forward, **options)
    assert len(drain(pipeline, loader(3, 7))) == 7
    assert gone == [True] * 7


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_gone_before_their_backward(kind, threads):
    run_ranks(let_go, 2, "farandole", kind=kind, threads=threads)
