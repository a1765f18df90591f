"""The loops that train the same model: a plain one, torchrec's pipeline and farandole's."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from recsys_model.model import Batch

KINDS = ("plain", "torchrec", "farandole")
Output = tuple[Tensor, Tensor]  # loss, logits


class PlainLoop:
    """One batch after the other, with the methods of a pipeline."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device):
        self._model, self._optimizer, self._device = model, optimizer, device

    def progress(self, batches: Iterator[Batch]) -> Output:
        batch = next(batches).to(self._device)
        self._optimizer.zero_grad()
        loss, output = self._model(batch)
        loss.backward()
        self._optimizer.step()
        return output

    def detach(self) -> nn.Module:
        return self._model


def pipeline(kind: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    cpu = torch.device("cpu")
    if kind == "plain":
        return PlainLoop(model, optimizer, cpu)
    if kind == "torchrec":
        from torchrec.distributed.train_pipeline import TrainPipelineSparseDist as TorchrecPipeline

        return TorchrecPipeline(model, optimizer, cpu)
    from farandole.sparse import TrainPipelineSparseDist

    return TrainPipelineSparseDist(model, optimizer, cpu)


class Contestant:
    """One loop over one backend, with a model and batches of its own; it runs in rounds beside the others."""

    def __init__(self, name: str, loop: Any, batches: Iterator[Batch]):
        self.name = name
        self.losses: list[float] = []  # of this rank's batches
        self.speeds: list[float] = []  # steps per second, of each round
        self._loop, self._batches = loop, batches

    def run(self, steps: int) -> None:
        """A round of all ranks."""
        outputs = []
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            loss, _logits = self._loop.progress(self._batches)
            outputs.append(loss)
        dist.barrier()
        self.speeds.append(steps / (time.perf_counter() - start))
        self.losses += torch.stack(outputs).tolist()

    @torch.no_grad()
    def predict(self, batch: Batch) -> Tensor | None:
        """After the last round: the logits of all ranks' batches, on rank 0."""
        model = self._loop.detach()
        model.eval()
        _, (_, logits) = model(batch)
        parts = [torch.empty_like(logits) for _ in range(dist.get_world_size())] if dist.get_rank() == 0 else None
        dist.gather(logits, parts)
        return torch.cat(parts) if parts is not None else None
