"""Plans as users see them: made by name, lowered, proven and simulated."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from farandole import _C
from farandole.pipelining._stage_edges import Edge, pairs_of
from farandole.pipelining._transfers import Transfers, as_tuple

if TYPE_CHECKING:
    from farandole.pipelining._stage import PipelineStage

_CHANNELS = {
    "tagged": _C.ChannelModel.TAGGED,
    "fifo_per_edge": _C.ChannelModel.FIFO_PER_EDGE,
    "one_queue_per_rank": _C.ChannelModel.ONE_QUEUE_PER_RANK,
}


def schedule_names() -> list[str]:
    """The names that :func:`plan` knows."""
    return list(_C.schedule_names())


def plan(
    name: str,
    num_stages: int,
    n_microbatches: int,
    *,
    num_ranks: int | None = None,
    forward_only: bool = False,
    warmup_per_stage: int = 1,
    microbatch_group: int | None = None,
    edges: Sequence[Edge] | None = None,
) -> _C.Plan:
    """The compute plan of a schedule: which rank runs what in which order, without communication.

    Args:
        name: one of :func:`schedule_names`, upper or lower case alike.
        num_stages: stages of the pipeline.
        n_microbatches: microbatches per step.
        num_ranks: processes of the pipeline; as many as stages by default.
        forward_only: leave out the backwards.
        warmup_per_stage: of 1F1B: forwards of the warm-up for each stage that follows; 1 as in Megatron-LM, 2 as in
            PiPPy, which holds about twice the activations.
        microbatch_group: of interleaved schedules: microbatches that a rank runs through one of its stages before it
            goes on to the next one (Megatron-LM's microbatch_group_size_per_vp_stage); as many as ranks by default.
        edges: (from, to) for each stage whose output is another one's input, from lower to higher stages; by default
            each stage's goes to the next one. DualPipe, whose ``num_stages`` are those of two copies, takes those of one.
            (from, to, outputs), as schedules take them, is the same here.

    Raises:
        ValueError: an unknown name, counts that the schedule cannot run, or edges that are no such graph.
        TypeError: a count that is no int.
    """
    if not isinstance(name, str):
        raise TypeError(f"name is {name!r}, expected one of {', '.join(schedule_names())}")
    stages, microbatches, ranks = _counts(num_stages, n_microbatches, num_ranks)
    group = 0 if microbatch_group is None else _whole("microbatch_group", microbatch_group)
    warmup = _whole("warmup_per_stage", warmup_per_stage)
    return _C.make_plan(name, ranks, stages, microbatches, forward_only, warmup, group, pairs_of(edges))


@dataclass(frozen=True)
class PlanCandidate:
    """A plan that was looked at: its name, simulated seconds of a step, bytes on the rank that holds most."""

    name: str
    makespan: float
    peak_memory: float
    fits: bool


@dataclass(frozen=True)
class AutoPlan:
    """What :func:`auto_plan` chose, among what (the fastest first), and why."""

    plan: _C.Plan
    chosen: PlanCandidate
    candidates: tuple[PlanCandidate, ...]
    reason: str


def auto_plan(
    num_stages: int,
    n_microbatches: int,
    seconds: Sequence[Sequence[float]],
    *,
    num_ranks: int | None = None,
    transfer: float | Transfers | None = None,
    memory: Sequence[Sequence[float]] | None = None,
    memory_limit: float | None = None,
    rank_of_stage: Sequence[int] | None = None,
    forward_only: bool = False,
    edges: Sequence[Edge] | None = None,
) -> AutoPlan:
    """The fastest plan found for measured stages, by simulation, within a limit of memory.

    All schedules that can run these counts are tried, and plans made by list scheduling: the result is never slower
    than the best of the schedules under the same limit.

    Args:
        num_stages: stages of the pipeline.
        n_microbatches: microbatches per step.
        seconds: per stage (forward, backward, input's backward, weights' backward).
        num_ranks: processes of the pipeline; as many as stages by default.
        transfer: seconds per message, or those over each edge (:func:`measure_transfers`); by default those of
            ``seconds``, where :func:`profile_costs` was given some, else none.
        memory: per stage the bytes that a microbatch holds from its forward on, and those that are left from the
            input's backward to the weights'; nothing by default.
        memory_limit: bytes on each rank; none by default.
        rank_of_stage: where the stages are. By default they go round the ranks, or, with two for each, form a V.
        forward_only: leave out the backwards.
        edges: the graph of stages, as :func:`plan` takes it; by default each stage's output goes to the next one. Stages
            that do not need each other may then run at the same time; plans of list scheduling look for that, the others
            keep the chain's order on each rank.

    Raises:
        ValueError: counts and costs that do not fit each other; edges that are no graph from lower to higher stages; no
            plan within the limit (it names the one that needs least).
        TypeError: a count that is no int.
    """
    stages, microbatches, ranks = _counts(num_stages, n_microbatches, num_ranks)
    held = [(0.0, 0.0)] * stages if memory is None else memory
    made, chosen, candidates, reason = _C.auto_plan(
        ranks,
        stages,
        microbatches,
        forward_only,
        [_numbers("seconds", stage, 4) for stage in seconds],
        _transfer(transfer, seconds),
        [_numbers("memory", stage, 2) for stage in held],
        math.inf if memory_limit is None else memory_limit,
        rank_of_stage,
        pairs_of(edges),
    )
    return AutoPlan(made, PlanCandidate(*chosen), tuple(PlanCandidate(*one) for one in candidates), reason)


def _counts(num_stages: int, n_microbatches: int, num_ranks: int | None) -> tuple[int, int, int]:
    """Stages, microbatches and ranks."""
    stages = _whole("num_stages", num_stages)
    return (
        stages,
        _whole("n_microbatches", n_microbatches),
        stages if num_ranks is None else _whole("num_ranks", num_ranks),
    )


def _whole(name: str, value: int) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}, expected an int") from None


def _numbers(name: str, stage: Sequence[float], count: int) -> Any:
    if len(stage) != count:
        raise ValueError(f"{name} has {len(stage)} numbers for a stage, expected {count}")
    return tuple(float(number) for number in stage)


def check_computed(plan: _C.Plan, schedule: str, n_microbatches: int, forward_only: bool) -> None:
    """
    Raises:
        ValueError: a schedule's ``compute_plan`` has given another plan than it was asked for.
    """
    if plan.num_microbatches != n_microbatches:
        raise ValueError(f"the plan has {plan.num_microbatches} microbatches, expected n_microbatches={n_microbatches}")
    if forward_only and _has_backwards(plan):
        raise ValueError(
            f"compute_plan(forward_only=True) of {schedule} has backwards, expected none: Plan.forwards() leaves them out"
        )


def check_trains(plan: _C.Plan, schedule: str) -> None:
    """
    Raises:
        ValueError: a step of it would leave no gradients.
    """
    if not _has_backwards(plan):
        raise ValueError(f"the plan of {schedule} has no backwards, expected some for step(): or call eval()")


def check_placement(plan: _C.Plan, schedule: str, stages: Sequence[PipelineStage]) -> None:
    """
    Raises:
        ValueError: the plan is not for these stages of a rank, or for another group.
    """
    first = stages[0]
    if (plan.num_ranks, plan.num_stages) != (first.group_size, first.num_stages):
        raise ValueError(
            f"the plan of {schedule} has {plan.num_ranks} ranks and {plan.num_stages} stages, expected "
            f"{first.group_size} and {first.num_stages} as the group and the stages have"
        )
    expected = [stage for stage, rank in enumerate(plan.rank_of_stage) if rank == first.group_rank]
    given = [stage.stage_index for stage in stages]
    if given != expected:
        raise ValueError(
            f"stage_index is {_listed(given)}, expected {_listed(expected)}: {schedule} runs "
            f"{'that stage' if len(expected) == 1 else 'those stages'} on rank {first.group_rank} of the group"
        )


def _listed(stages: list[int]) -> str:
    return str(stages[0]) if len(stages) == 1 else str(stages)


def _has_backwards(plan: _C.Plan) -> bool:
    return any(re.search(r"\d[BIW]\d", action) for row in plan.actions for action in row)


def lower(plan: _C.Plan, channel: str = "tagged") -> _C.Plan:
    """Inserts the communication, one batch per peer, and proves the result for a kind of channel: see :func:`validate`."""
    return plan.lower(_channel(channel))


def validate(plan: _C.Plan, channel: str = "tagged") -> None:
    """Proves that a lowered plan runs to its end.

    Args:
        plan: a plan with communication, see :func:`lower`.
        channel: "tagged" (UCX, gloo), "fifo_per_edge" (NCCL, a communicator per directed
            edge) or "one_queue_per_rank" (NCCL, one communicator and stream).

    Raises:
        ValueError: with the action that is wrong, or the cycle of waits on a grid of ranks by steps.
    """
    _C.validate_plan(plan, _channel(channel))


def simulate(
    plan: _C.Plan,
    seconds: Mapping[str, float] | Sequence[Sequence[float]],
    transfer: float | Transfers | None = None,
) -> _C.SimulationResult:
    """When each action runs if every rank starts its actions as early as it can.

    Args:
        plan: with or without communication.
        seconds: durations of compute: by the action's text ({"0F0": 0.01, ...}, of every
            compute action), or per stage (forward, backward, input's backward, weights' backward).
        transfer: seconds per message, as :func:`auto_plan` takes them.
    """
    given = _transfer(transfer, seconds)
    if isinstance(seconds, Mapping):
        return _C.simulate_plan(plan, dict(seconds), given)
    return _C.simulate_plan(plan, [_numbers("seconds", stage, 4) for stage in seconds], given)


def _transfer(given: float | Transfers | None, seconds: Any) -> Any:
    if given is None:
        given = getattr(seconds, "transfers", None)
    return as_tuple(0.0 if given is None else given)


def _channel(name: str) -> _C.ChannelModel:
    if name not in _CHANNELS:
        raise ValueError(f"channel is {name!r}, expected one of {', '.join(_CHANNELS)}")
    return _CHANNELS[name]
