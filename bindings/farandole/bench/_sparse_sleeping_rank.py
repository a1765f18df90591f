"""A rank of the sparse pipeline's benchmark: a loader, an input_dist and a forward that sleep instead of working."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from farandole.bench._ranks import Rank


class _Request:
    def __init__(self, wait: Callable[[], Any]) -> None:
        self.wait = wait


class _SleepingTable(nn.Module):
    """Half of its input_dist is the exchange of splits, half that of the data."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._half = seconds / 2

    def create_context(self) -> None:
        return None

    def input_dist(self, context: None, rows: torch.Tensor) -> _Request:
        def exchange() -> _Request:
            time.sleep(self._half)
            return _Request(arrive)

        def arrive() -> torch.Tensor:
            time.sleep(self._half)
            return rows

        return _Request(exchange)

    def compute_and_output_dist(self, context: None, rows: torch.Tensor) -> torch.Tensor:
        return rows

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.compute_and_output_dist(None, self.input_dist(None, rows).wait().wait())


class _SleepingModel(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.table = _SleepingTable(seconds)
        self.weight = nn.Parameter(torch.ones(()))
        self._seconds = seconds

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.table(batch)
        return self.score(rows), batch

    def score(self, rows: torch.Tensor) -> torch.Tensor:
        if not isinstance(rows, torch.fx.Proxy):
            time.sleep(self._seconds)
        return rows * self.weight


def _load(seconds: float) -> Iterator[torch.Tensor]:
    batch = torch.ones(8)
    while True:
        time.sleep(seconds)
        yield batch


def run_steps(rank: Rank, seconds: float, warm_up: int, count: int) -> list[float]:
    """Runs on all ranks: the seconds of each step."""
    from farandole.sparse import TrainPipelineSparseDist

    key = ("sparse sleeping", seconds)
    if key not in rank.state:
        model = _SleepingModel(seconds)
        pipeline = TrainPipelineSparseDist(
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            "cpu",
            process_group=rank.groups["farandole"],
            load_on_thread=True,
            dist_on_thread=True,
        )
        rank.state[key] = pipeline, _load(seconds)
    pipeline, batches = rank.state[key]
    dist.barrier(rank.groups["farandole"])
    taken = []
    for _ in range(warm_up + count):
        start = time.monotonic()
        pipeline.progress(batches)
        taken.append(time.monotonic() - start)
    return taken[warm_up:]


def time_stages(rank: Rank, seconds: float, warm_up: int, count: int) -> list[float]:
    """Runs on all ranks: the seconds of the longest stage in each step of a plain loop, which has one after the other:
    the next batch; its input_dist; forward, backward and optimizer."""
    key = ("sparse stages", seconds)
    if key not in rank.state:
        model = _SleepingModel(seconds)
        rank.state[key] = model, torch.optim.SGD(model.parameters(), lr=0.0), _load(seconds)
    model, optimizer, batches = rank.state[key]
    dist.barrier(rank.groups["farandole"])
    longest = []
    for _ in range(warm_up + count):
        times = [time.monotonic()]
        batch = next(batches)
        times.append(time.monotonic())
        rows = model.table.input_dist(None, batch).wait().wait()
        times.append(time.monotonic())
        optimizer.zero_grad()
        model.score(rows).sum(dim=0).backward()
        optimizer.step()
        times.append(time.monotonic())
        longest.append(max(end - start for start, end in itertools.pairwise(times)))
    return longest[warm_up:]
