"""Plans as users see them: made by name, lowered, proven and simulated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from farandole import _C

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

    Raises:
        ValueError: an unknown name, or counts that the schedule cannot run.
    """
    ranks = num_stages if num_ranks is None else num_ranks
    group = 0 if microbatch_group is None else microbatch_group
    return _C.make_plan(name, ranks, num_stages, n_microbatches, forward_only, warmup_per_stage, group)


def lower(plan: _C.Plan, channel: str = "one_queue_per_rank") -> _C.Plan:
    """Inserts the communication, one batch per peer, and proves the result for a kind of channel."""
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
    plan: _C.Plan, seconds: Mapping[str, float] | Sequence[Sequence[float]], transfer: float = 0.0
) -> _C.SimulationResult:
    """When each action runs if every rank starts its actions as early as it can.

    Args:
        plan: with or without communication.
        seconds: durations of compute: by the action's text ({"0F0": 0.01, ...}, of every
            compute action), or per stage (forward, backward, input's backward, weights' backward).
        transfer: seconds per message.
    """
    if isinstance(seconds, Mapping):
        return _C.simulate_plan(plan, dict(seconds), transfer)
    return _C.simulate_plan(plan, [tuple(stage) for stage in seconds], transfer)


def _channel(name: str) -> _C.ChannelModel:
    if name not in _CHANNELS:
        raise ValueError(f"channel is {name!r}, expected one of {', '.join(_CHANNELS)}")
    return _CHANNELS[name]
