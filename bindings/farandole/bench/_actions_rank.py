"""A rank of the benchmark of what an action costs: stages so small that little but the schedule is left."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import _engine_run_backward
from torch.distributed import pipelining as torch_pipelining

from farandole import pipelining
from farandole.bench._pipeline_rank import MICROBATCHES, Case
from farandole.bench._ranks import Rank

WIDTH = 8
ROWS = 2  # of a microbatch


@dataclass
class _Prepared:
    step: Callable[[], None]
    bare: Callable[[], None]
    modules: list[nn.Module]
    actions: int  # of this rank, with communication, in farandole's plan


def time_steps(rank: Rank, peer: str, case: Case, count: int) -> tuple[list[float], list[float], int]:
    """Runs on both ranks: seconds of steps and, in turn, of the bare loop; and the number of the rank's actions.

    The bare loop calls the same modules, the loss and the autograd engine as often as the step does (a split backward
    once), and nothing else.
    """
    key = (peer, case)
    if key not in rank.state:
        rank.state[key] = _prepare(rank, peer, case)
    prepared: _Prepared = rank.state[key]
    steps: list[float] = []
    bare: list[float] = []
    for _ in range(count):
        for fn, taken in ((prepared.step, steps), (prepared.bare, bare)):
            for module in prepared.modules:
                module.zero_grad(set_to_none=True)
            dist.barrier(rank.groups["farandole"])
            start = time.perf_counter()
            fn()
            taken.append(time.perf_counter() - start)
    return steps, bare, prepared.actions


def _prepare(rank: Rank, peer: str, case: Case) -> _Prepared:
    plan = case.plan()
    mine = {index: nn.Linear(WIDTH, WIDTH) for index, owner in enumerate(plan.rank_of_stage) if owner == rank.rank}
    rows = (ROWS, ROWS + 1) if peer == "learning" else (ROWS,)
    batches = itertools.cycle([torch.ones(count * MICROBATCHES, WIDTH) for count in rows])
    last = plan.num_stages - 1
    many = case.stages_per_rank > 1
    schedule: Any
    if peer != "torch":
        ours = [
            pipelining.PipelineStage(module, i, plan.num_stages, "cpu", group=rank.groups["farandole"])
            for i, module in mine.items()
        ]
        made: Any = pipelining.get_schedule_class(case.schedule)
        schedule = made(ours if many else ours[0], MICROBATCHES, nn.functional.mse_loss)
    else:
        theirs = [
            torch_pipelining.PipelineStage(module, i, plan.num_stages, torch.device("cpu"), group=rank.groups["gloo"])
            for i, module in mine.items()
        ]
        schedule = getattr(torch_pipelining, case.torch_class)(
            theirs if many else theirs[0], MICROBATCHES, nn.functional.mse_loss
        )

    def step() -> None:
        batch = next(batches)
        args = (batch,) if 0 in mine else ()
        ends = {"target": batch} if last in mine else {}
        schedule.step(*args, return_outputs=False, **ends)

    return _Prepared(
        step,
        lambda: run_bare(mine, last),
        list(mine.values()),
        len(plan.lower().actions[rank.rank]),
    )


def run_bare(modules: dict[int, nn.Module], last: int, *, splits: bool = False) -> None:
    """With ``splits`` the engine is called twice for a microbatch, for the inputs and for the weights."""
    for index, module in modules.items():
        for _ in range(MICROBATCHES):
            x = torch.ones(ROWS, WIDTH, requires_grad=index > 0)
            output = module(x)
            if index == last:
                output = nn.functional.mse_loss(output, x.detach())
            grad = (torch.ones_like(output),)
            if splits and index > 0:
                _engine_run_backward((output,), grad, True, False, (x,), True, accumulate_grad=True)
                weights = tuple(module.parameters())
                _engine_run_backward((output,), grad, False, False, weights, True, accumulate_grad=True)
            else:
                _engine_run_backward((output,), grad, False, False, (), True, accumulate_grad=True)


CASES = [
    Case("1F1B", "Schedule1F1B", 1),
    Case("Interleaved1F1B", "ScheduleInterleaved1F1B", 2),
    Case("InterleavedZeroBubble", "ScheduleInterleavedZeroBubble", 2),
    Case("ZBV", "ScheduleZBVZeroBubble", 2),
]
