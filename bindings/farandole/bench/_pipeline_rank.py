"""The pipeline benchmark as one rank runs it: the same stage under farandole's 1F1B and under torch's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining as torch_pipelining

from farandole import pipelining
from farandole.bench._ranks import RANKS, Rank

SEQUENCE = 64
MICROBATCH = 2  # rows
MICROBATCHES = 16
_HEADS = 4


@dataclass
class Step:
    """One step of one rank. Seconds; start and end are of a clock that the host's processes share."""

    start: float
    end: float
    durations: dict[str, float]  # of "0F3", "1B7"
    losses: list[float]  # of each microbatch, on the last stage


class TimedStage(torch_pipelining.PipelineStage):
    """torch's stage, with the time that each of its forwards and backwards takes."""

    def __init__(self, module: nn.Module, rank: Rank, group: Any):
        super().__init__(module, rank.rank, RANKS, torch.device("cpu"), group=group)
        self.durations: dict[str, float] = {}
        self.last_forward = "before the first"

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self.last_forward = f"{self.stage_index}F{fwd_chunk_id}"
        with Stopwatch(self.durations, self.last_forward):
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        with Stopwatch(self.durations, f"{self.stage_index}B{bwd_chunk_id}"):
            return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)


class Stopwatch:
    """Adds the time of a block to an entry."""

    def __init__(self, entries: dict[str, float], name: str):
        self._entries = entries
        self._name = name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        taken = time.perf_counter() - self._start
        self._entries[self._name] = self._entries.get(self._name, 0.0) + taken


@dataclass
class _Prepared:
    schedule: Any
    module: nn.Module
    inputs: list[torch.Tensor]  # args of step(): on the first stage
    target: torch.Tensor | None  # on the last stage
    durations: Callable[[], dict[str, float]]  # of the last step


def run_steps(rank: Rank, peer: str, width: int, warm_up: int, count: int) -> list[Step]:
    """Runs on both ranks. The peer is "farandole", or "torch" for torch's pipelining over gloo."""
    key = (peer, width)
    if key not in rank.state:
        rank.state[key] = _prepare(rank, peer, width)
    prepared: _Prepared = rank.state[key]
    for _ in range(warm_up):
        _step(rank, prepared)
    return [_step(rank, prepared) for _ in range(count)]


def _step(rank: Rank, prepared: _Prepared) -> Step:
    prepared.module.zero_grad(set_to_none=True)
    losses: list[torch.Tensor] | None = None if prepared.target is None else []
    dist.barrier(rank.groups["farandole"])
    start = time.monotonic()
    prepared.schedule.step(*prepared.inputs, target=prepared.target, losses=losses, return_outputs=False)
    end = time.monotonic()
    compute = {f"{rank.rank}{kind}{microbatch}" for kind in "FB" for microbatch in range(MICROBATCHES)}
    durations = {action: seconds for action, seconds in prepared.durations().items() if action in compute}
    return Step(start, end, durations, [loss.item() for loss in losses or []])


def _prepare(rank: Rank, peer: str, width: int) -> _Prepared:
    torch.manual_seed(rank.rank)
    module = nn.TransformerEncoderLayer(
        width, _HEADS, dim_feedforward=4 * width, dropout=0.0, activation="gelu", batch_first=True
    )
    generator = torch.Generator().manual_seed(width)
    batch, target = torch.randn(2, MICROBATCH * MICROBATCHES, SEQUENCE, width, generator=generator)
    inputs = [batch] if rank.rank == 0 else []
    last_target = target if rank.rank == RANKS - 1 else None
    if peer == "farandole":
        stage = pipelining.PipelineStage(module, rank.rank, RANKS, "cpu", group=rank.groups["farandole"])
        schedule = pipelining.Schedule1F1B(stage, MICROBATCHES, nn.functional.mse_loss)
        return _Prepared(schedule, module, inputs, last_target, lambda: _traced(schedule))
    if peer == "torch":
        timed = TimedStage(module, rank, rank.groups["gloo"])

        def loss_fn(output: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
            # torch computes the loss of a microbatch right after its forward, ours inside of it.
            # (And once before the first step, to learn shapes.)
            with Stopwatch(timed.durations, timed.last_forward):
                return nn.functional.mse_loss(output, expected)

        def take_durations() -> dict[str, float]:
            taken, timed.durations = timed.durations, {}
            return taken

        theirs = torch_pipelining.Schedule1F1B(timed, MICROBATCHES, loss_fn)
        return _Prepared(theirs, module, inputs, last_target, take_durations)
    raise ValueError(f"peer is {peer!r}, expected 'farandole' or 'torch'")


def _traced(schedule: pipelining.Schedule1F1B) -> dict[str, float]:
    return {action: end - start for action, start, end in schedule.last_step_trace()}
