"""A rank of the sparse pipeline's benchmark: a small DLRM of torchrec, by a plain loop and by pipelines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from farandole.bench._ranks import Rank

PLAIN, OURS, TORCHREC = "plain loop", "farandole", "torchrec over gloo"
PEERS = (PLAIN, OURS, TORCHREC)
BACKENDS = ("farandole", "gloo")


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


def run_steps(rank: Rank, peer: str, samples: int, ahead: int, count: int, warm_up: int) -> float:
    """Runs on all ranks: the seconds of a step with a batch of so many samples, of a model and a pipeline of its own: what
    a pipeline has chosen by measured times is for such batches. ``ahead``: modules between the batch and the tables."""
    from farandole.bench import _sparse_model

    pipeline = _pipeline(rank, peer, ahead)
    batches = iter(_sparse_model.make_batches(rank.rank, samples, warm_up + count + 3))
    for _ in range(warm_up):
        pipeline.progress(batches)
    dist.barrier(rank.groups["farandole"])
    start = time.perf_counter()
    for _ in range(count):
        pipeline.progress(batches)
    dist.barrier(rank.groups["farandole"])
    taken = (time.perf_counter() - start) / count
    for _ in batches:
        pass
    _drain(pipeline, batches)
    return taken


def _drain(pipeline: Any, batches: Iterator[Any]) -> None:
    while not isinstance(pipeline, _PlainLoop):
        try:
            pipeline.progress(batches)
        except StopIteration:
            return
