"""A rank of the sparse pipeline's benchmark: a small DLRM of torchrec, by a plain loop and by pipelines."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from farandole.bench._ranks import Rank

PLAIN, OURS, TORCHREC = "plain loop", "farandole", "torchrec over gloo"
PEERS = (PLAIN, OURS, TORCHREC)
BACKENDS = ("farandole", "gloo")
_BATCHES = 64  # different ones


class _PlainLoop:
    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device

    def progress(self, batches: Iterator[Any]) -> Any:
        batch = next(batches).to(self._device, non_blocking=True)
        self._optimizer.zero_grad()
        losses, output = self._model(batch)
        torch.sum(losses, dim=0).backward()
        self._optimizer.step()
        return output


def _pipeline(rank: Rank, peer: str, ahead: int) -> Any:
    from farandole.bench import _sparse_model

    group = rank.groups["gloo" if peer == TORCHREC else "farandole"]
    model, optimizer = _sparse_model.sharded(group, ahead)
    cpu = torch.device("cpu")
    if peer == PLAIN:
        return _PlainLoop(model, optimizer, cpu)
    if peer == TORCHREC:
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist as TorchrecPipeline

        return TorchrecPipeline(model, optimizer, cpu)
    from farandole.sparse import TrainPipelineSparseDist

    return TrainPipelineSparseDist(model, optimizer, cpu, process_group=group, strict=True)


class _Endless:
    """Batches over and over, until they are ended."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = itertools.cycle(batches)
        self.has_ended = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self.has_ended:
            raise StopIteration
        return next(self._batches)


def begin(rank: Rank, peer: str, samples: int, ahead: int, warm_up: int) -> None:
    """Runs on all ranks: a model and a pipeline for batches of so many samples; what it chooses by measured times is for
    these. ``ahead``: modules between the batch and the tables."""
    from farandole.bench import _sparse_model

    pipeline = _pipeline(rank, peer, ahead)
    batches = _Endless(_sparse_model.make_batches(rank.rank, samples, _BATCHES))
    rank.state["sparse"] = pipeline, batches
    for _ in range(warm_up):
        pipeline.progress(batches)


def run_steps(rank: Rank, warm_up: int, count: int) -> float:
    """Runs on all ranks, between begin() and end(): the seconds of a step."""
    pipeline, batches = rank.state["sparse"]
    for _ in range(warm_up):
        pipeline.progress(batches)
    dist.barrier(rank.groups["farandole"])
    start = time.perf_counter()
    for _ in range(count):
        pipeline.progress(batches)
    dist.barrier(rank.groups["farandole"])
    return (time.perf_counter() - start) / count


def end(rank: Rank) -> None:
    """Runs on all ranks: computes what is in flight."""
    pipeline, batches = rank.state.pop("sparse")
    batches.has_ended = True
    with contextlib.suppress(StopIteration):
        while True:
            pipeline.progress(batches)
