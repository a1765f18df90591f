"""The pipeline benchmark as one rank runs it: the same stages under farandole's schedules and under torch's."""

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
from farandole.pipelining._rows import parse
from farandole.pipelining._stage_edges import Ends

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
    losses: list[float]  # of each microbatch that ends on this rank


@dataclass(frozen=True)
class Case:
    """A schedule by its name in both systems, with so many stages on each rank."""

    schedule: str
    torch_class: str
    stages_per_rank: int

    def plan(self) -> pipelining.Plan:
        return pipelining.plan(self.schedule, self.stages_per_rank * RANKS, MICROBATCHES, num_ranks=RANKS)


class TimedStage(torch_pipelining.PipelineStage):
    """torch's stage, with the time that each of its forwards and backwards takes."""

    def __init__(self, module: nn.Module, index: int, num_stages: int, group: Any, durations: dict[str, float]):
        super().__init__(module, index, num_stages, torch.device("cpu"), group=group)
        self.durations = durations
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
    modules: list[nn.Module]
    actions: set[str]  # of compute, on this rank, those of an OVERLAP_F_B each by itself
    inputs: list[torch.Tensor]  # args of step(): on a rank with a first stage (DualPipe has two)
    target: torch.Tensor | None  # on a rank with a last stage
    durations: Callable[[], dict[str, float]]  # of the last step


def run_steps(rank: Rank, peer: str, case: Case, width: int, warm_up: int, count: int) -> list[Step]:
    """Runs on both ranks. The peer is "farandole", or "torch" for torch's pipelining over gloo."""
    key = (peer, case, width)
    if key not in rank.state:
        rank.state[key] = _prepare(rank, peer, case, width)
    prepared: _Prepared = rank.state[key]
    for _ in range(warm_up):
        _step(rank, prepared)
    return [_step(rank, prepared) for _ in range(count)]


def _step(rank: Rank, prepared: _Prepared) -> Step:
    for module in prepared.modules:
        module.zero_grad(set_to_none=True)
    losses: list[torch.Tensor] | None = None if prepared.target is None else []
    dist.barrier(rank.groups["farandole"])
    start = time.monotonic()
    prepared.schedule.step(*prepared.inputs, target=prepared.target, losses=losses, return_outputs=False)
    end = time.monotonic()
    durations = {action: taken for action, taken in prepared.durations().items() if action in prepared.actions}
    return Step(start, end, durations, [loss.item() for loss in losses or []])


def _prepare(rank: Rank, peer: str, case: Case, width: int) -> _Prepared:
    plan = case.plan()
    mine = [index for index, owner in enumerate(plan.rank_of_stage) if owner == rank.rank]
    modules: dict[int, nn.Module] = {}
    for index in mine:
        torch.manual_seed(index)
        modules[index] = nn.TransformerEncoderLayer(
            width, _HEADS, dim_feedforward=4 * width, dropout=0.0, activation="gelu", batch_first=True
        )
    generator = torch.Generator().manual_seed(width)
    batch, target = torch.randn(2, MICROBATCH * MICROBATCHES, SEQUENCE, width, generator=generator)
    make = {"farandole": _ours, "torch": _torchs}[peer]
    schedule, durations = make(rank, case, modules, plan.num_stages)
    ends = Ends.of(plan)
    return _Prepared(
        schedule,
        list(modules.values()),
        {
            f"{leaf.stage}{leaf.kind}{leaf.microbatch}"
            for action in map(parse, plan.actions[rank.rank])
            for leaf in action.parts or (action,)
        },
        [batch] if ends.first.intersection(mine) else [],
        target if set(ends.last).intersection(mine) else None,
        durations,
    )


def _ours(rank: Rank, case: Case, modules: dict[int, nn.Module], num_stages: int) -> tuple[Any, Any]:
    stages = [
        pipelining.PipelineStage(module, index, num_stages, "cpu", group=rank.groups["farandole"])
        for index, module in modules.items()
    ]
    made: Any = pipelining.get_schedule_class(case.schedule)
    schedule = made(stages if case.stages_per_rank > 1 else stages[0], MICROBATCHES, nn.functional.mse_loss)
    return schedule, lambda: {action: end - start for action, start, end in schedule.last_step_trace()}


def _torchs(rank: Rank, case: Case, modules: dict[int, nn.Module], num_stages: int) -> tuple[Any, Any]:
    durations: dict[str, float] = {}
    stages = [
        TimedStage(module, index, num_stages, rank.groups["gloo"], durations) for index, module in modules.items()
    ]

    def loss_fn(output: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
        # torch computes the loss of a microbatch right after its forward, ours inside of it.
        # (And once before the first step, to learn shapes.)
        with Stopwatch(durations, stages[-1].last_forward):
            return nn.functional.mse_loss(output, expected)

    def take_durations() -> dict[str, float]:
        taken = dict(durations)
        durations.clear()
        return taken

    made = getattr(torch_pipelining, case.torch_class)
    return made(stages if case.stages_per_rank > 1 else stages[0], MICROBATCHES, loss_fn), take_durations
