"""Steps as they were: gathered from all ranks, and what they cost."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

from farandole import _C
from farandole._clocks import clock_offset
from farandole.pipelining._rows import parse
from farandole.pipelining._schedule import PipelineSchedule
from farandole.pipelining._transfers import Transfers

_KINDS = ("F", "B", "I", "W")  # as simulate() takes their costs


def gather_timeline(schedule: PipelineSchedule) -> _C.SimulationResult:
    """The schedule's last step as all ranks saw it, on every rank. All ranks of the pipeline's group call it.

    The step begins, at 0 s, with the rank that began first, and ends with the last action of any rank; what ranks do
    after their last action (agreeing that nobody failed) is not part of it. Clocks of several hosts are compared by
    messages, to half of a round trip. On GPUs it is the step as they ran it, which is waited for; their clocks are
    compared with their hosts', to what a host takes to wake up, and messages are shown where the rank's stream was when they were
    posted, since they are on others.

        measured = gather_timeline(schedule)
        predicted = simulate(schedule.plan(), profile_costs(measured))
        Path("step.svg").write_text(draw_svg({"predicted": predicted, "measured": measured}))

    Raises:
        RuntimeError: a rank has not run a step yet, or the last one was refused, or was run on a GPU without
            ``times_device``; on all ranks.
    """
    stage, executor = schedule._stages[0], schedule._last_executor
    offset = clock_offset(stage.group, torch.device("cpu"))
    began = 0.0 if executor is None else executor.last_step_began - offset
    untimed, trace = "", []
    try:
        trace = schedule.last_step_trace()
    except RuntimeError as error:
        untimed = str(error)
    ranks: list[Any] = [None] * stage.group_size
    dist.all_gather_object(ranks, (began, trace, untimed), group=stage.group)
    for rank, (_, _, reason) in enumerate(ranks):
        if reason:
            raise RuntimeError(f"gather_timeline() on rank {rank}: {reason}")
    idle = [rank for rank, (_, trace, _) in enumerate(ranks) if not trace]
    if idle:
        raise RuntimeError(
            f"gather_timeline() on ranks {idle} before their first step, or after one that was refused; expected it after "
            "one that ran"
        )
    # A GPU comes to the step when it is done with what it was given before.
    on_host = stage.device.type == "cpu"
    zero = min(began if on_host else began + trace[0][1] for began, trace, _ in ranks)
    return _C.measured_step(
        [
            [(action, start + began - zero, end + began - zero) for action, start, end in trace]
            for began, trace, _ in ranks
        ]
    )


class StageCosts(list[tuple[float, float, float, float]]):
    """For each stage the seconds of its F, B, I and W; and what messages take, where that was measured."""

    def __init__(
        self, seconds: Iterable[tuple[float, float, float, float]] = (), transfers: Transfers | None = None
    ) -> None:
        super().__init__(seconds)
        self.transfers = transfers


def profile_costs(*steps: _C.SimulationResult, transfers: Transfers | None = None) -> StageCosts:
    """What the actions of each stage took, for :func:`simulate` and :func:`auto_plan`, and what messages do.

    Args:
        *steps: measured steps of one plan, each with all ranks (:func:`gather_timeline`).
        transfers: of the messages between the stages (:func:`measure_transfers`); nothing by default.

    Returns:
        For each stage the median seconds of its F, B, I and W, over microbatches and steps. A B that was not run is
        taken for as long as I and W together, an I or a W that was not for half of the B: an estimate, to be measured
        with a schedule that splits backwards where it decides.

    Raises:
        ValueError: a stage runs nothing, or runs something only as part of an OVERLAP_F_B.
    """
    taken: dict[tuple[int, str], list[float]] = {}
    run = set()
    for step in steps:
        for rank in step.ranks:
            for text, start, end in rank.actions:
                action = parse(text)
                run |= {(leaf.stage, leaf.kind) for leaf in action.parts or (action,) if leaf.kind in _KINDS}
                if action.kind in _KINDS:
                    taken.setdefault((action.stage, action.kind), []).append(end - start)
    costs = StageCosts(transfers=transfers)
    for stage in range(1 + max((stage for stage, _ in run), default=-1)):
        kinds = [kind for kind in _KINDS if (stage, kind) in run]
        alone = [kind for kind in kinds if (stage, kind) in taken]
        if not kinds or kinds != alone:
            raise ValueError(
                f"stage {stage} runs {kinds} and, not overlapped, {alone}; expected to see each kind alone"
            )
        seen = {kind: statistics.median(taken[stage, kind]) for kind in kinds}
        whole = seen.get("B", seen.get("I", 0.0) + seen.get("W", 0.0))
        costs.append((seen.get("F", 0.0), whole, seen.get("I", whole / 2), seen.get("W", whole / 2)))
    return costs
