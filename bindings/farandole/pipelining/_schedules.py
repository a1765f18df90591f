"""The schedules by their names in torch.distributed.pipelining, and further ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farandole.pipelining._schedule import PipelineSchedule
from farandole.pipelining._schedule_bases import PipelineScheduleMulti, PipelineScheduleSingle
from farandole.pipelining._stage import PipelineStage
from farandole.pipelining._stage_edges import Edge


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards (GPipe, Huang et al. 2019). Activations of all microbatches live at once."""

    schedule_name = "GPipe"


class Schedule1F1B(PipelineScheduleSingle):
    """One forward, one backward once the pipeline is full (PipeDream-Flush, Narayanan et al. 2021).

    Stage s of p keeps the activations of at most k (p - s - 1) + 1 microbatches, k being warmup_per_stage. Any number
    of microbatches runs.

    Args:
        warmup_per_stage: forwards of the warm-up for each stage that follows: 1 as in Megatron-LM and torch, 2 as in
            PiPPy, which hides the time that messages take.

    The others as for :class:`PipelineScheduleSingle`.
    """

    schedule_name = "1F1B"

    def __init__(self, *args: Any, warmup_per_stage: int = 1, **kwargs: Any):
        if isinstance(warmup_per_stage, bool) or not isinstance(warmup_per_stage, int) or warmup_per_stage < 1:
            raise ValueError(f"warmup_per_stage is {warmup_per_stage!r}, expected an int of at least 1")
        self._plan_options = {"warmup_per_stage": warmup_per_stage}
        super().__init__(*args, **kwargs)


class ScheduleZBH1(PipelineScheduleSingle):
    """1F1B whose gradients of weights fill the bubble (ZB-H1, Qi et al. 2023), with the memory of 1F1B."""

    schedule_name = "ZB-H1"


class ScheduleZBH2(PipelineScheduleSingle):
    """ZB-H1 with a longer warm-up: next to no bubble, for about twice the activations (ZB-H2, Qi et al. 2023)."""

    schedule_name = "ZB-H2"


class _ScheduleOfStages(PipelineScheduleMulti):
    """Takes what torch's schedules of several stages take, in their order.

    Args:
        defer_pp_recv, max_active_stages, unshard_lookahead, defer_reduce_grad_wait, max_outstanding_sends: when torch's
            runtime posts messages and gathers and reduces what FSDP2 shards. They change nothing here, and a warning
            says so of other values than torch's defaults.

    The others as for :class:`PipelineScheduleMulti`.
    """

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any, ...] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        defer_pp_recv: bool = False,
        max_active_stages: int = 3,
        unshard_lookahead: str | tuple[int, ...] = "full",
        defer_reduce_grad_wait: bool = False,
        max_outstanding_sends: int | None = None,
        *,
        edges: Sequence[Edge] | None = None,
        check_for_nan_in_loss_and_grad: bool = False,
    ):
        _warn_of_options(
            type(self).__name__,
            defer_pp_recv=defer_pp_recv is not False,
            max_active_stages=max_active_stages != 3,
            unshard_lookahead=unshard_lookahead != "full",
            defer_reduce_grad_wait=defer_reduce_grad_wait is not False,
            max_outstanding_sends=max_outstanding_sends is not None,
        )
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            None,
            scale_grads,
            backward_requires_autograd,
            edges=edges,
            check_for_nan_in_loss_and_grad=check_for_nan_in_loss_and_grad,
        )


def _warn_of_options(name: str, **given: bool) -> None:
    for option, is_given in given.items():
        if is_given:
            warnings.warn(
                f"{name}: {option} changes nothing: it is for the runtime of torch.distributed.pipelining", stacklevel=4
            )


class ScheduleInterleaved1F1B(_ScheduleOfStages):
    """1F1B over several stages per rank, i, i + p, ... on rank i: a smaller bubble (Narayanan et al. 2021).

    Args:
        microbatch_group: microbatches that a rank runs through one of its stages before it goes on to the next one
            (Megatron-LM's microbatch_group_size_per_vp_stage); as many as ranks by default.

    The others as for :class:`PipelineScheduleMulti`. Any number of microbatches runs.
    """

    schedule_name = "Interleaved1F1B"

    def __init__(self, *args: Any, microbatch_group: int | None = None, **kwargs: Any):
        self._plan_options = {"microbatch_group": microbatch_group}
        super().__init__(*args, **kwargs)


class ScheduleLoopedBFS(_ScheduleOfStages):
    """All microbatches through one stage, then through the next (breadth-first, Lamy-Poirier 2022).

    Takes its arguments in torch's order, which has output_merge_spec after loss_fn.
    """

    schedule_name = "LoopedBFS"

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any, ...] | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        *options: Any,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        edges: Sequence[Edge] | None = None,
        check_for_nan_in_loss_and_grad: bool = False,
        **named_options: Any,
    ):
        super().__init__(
            stages,
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
            backward_requires_autograd,
            *options,
            edges=edges,
            check_for_nan_in_loss_and_grad=check_for_nan_in_loss_and_grad,
            **named_options,
        )


class ScheduleInterleavedZeroBubble(_ScheduleOfStages):
    """Interleaved 1F1B whose gradients of weights fill the bubble (Qi et al. 2023)."""

    schedule_name = "InterleavedZeroBubble"


class ScheduleZBVZeroBubble(_ScheduleOfStages):
    """Two stages per rank in a V, i and 2p - 1 - i: next to no bubble with the memory of 1F1B (ZBV, Qi et al. 2023)."""

    schedule_name = "ZBV"


class ScheduleVHalf(_ScheduleOfStages):
    """Two stages per rank in a V, with about half the activations of 1F1B (V-Half, Qi et al. 2024)."""

    schedule_name = "V-Half"


class ScheduleVMin(_ScheduleOfStages):
    """Two stages per rank in a V, with about a third of the activations of 1F1B (V-Min, Qi et al. 2024)."""

    schedule_name = "V-Min"


class ScheduleDualPipeV(_ScheduleOfStages):
    """Two stages per rank in a V, forwards beside backwards (DualPipeV, after DeepSeek-V3's DualPipe)."""

    schedule_name = "DualPipeV"


class ScheduleDualPipe(_ScheduleOfStages):
    """Two copies of a model in opposite directions (DualPipe, DeepSeek-V3 2024).

    Rank i of p has stage i, of the first copy, and stage 2p - 1 - i, which is stage p - 1 - i of the second:
    ``num_stages`` is 2p. The first half of the microbatches runs through the first copy, from rank 0 on, the second
    half through the other one, from rank p - 1 on. Both these ranks give the whole batch and all targets, and each has
    the losses and outputs of the microbatches that end there.

    With ``scale_grads`` a copy's gradients are means over its half of the microbatches: with both copies of a stage
    wrapped for data parallelism over the two ranks that have them (i and p - 1 - i, a group for each stage; both ranks
    wrap the stages in the same order), they become means over the batch. ``loss_weights`` are those of all microbatches,
    the same on both ranks: a gradient is then twice its part of their sum, which makes the mean of both copies the one
    over the batch also where a copy's half has more rows or tokens. ``edges`` are those of one copy.
    """

    schedule_name = "DualPipe"

    def __init__(self, stages: list[PipelineStage], *args: Any, **kwargs: Any):
        super().__init__(stages, *args, **kwargs)
        half = self._stages[0].num_stages // 2
        self._selected |= {
            (begin + half, end + half): outputs for (begin, end), outputs in self._selected.items()
        }  # of the second copy

    def _graph(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        copy, count = self._stages[0].num_stages // 2, self._n_microbatches // 2
        edges = [(stage, stage + 1) for stage in range(copy - 1)] if self._edges is None else self._edges
        both = [*edges, *((begin + copy, end + copy) for begin, end in edges)]
        return both, [(0, count)] * copy + [(count, 2 * count)] * copy


_CLASSES: dict[str, type[PipelineSchedule]] = {
    "1F1B": Schedule1F1B,
    "GPipe": ScheduleGPipe,
    "ZB-H1": ScheduleZBH1,
    "ZB-H2": ScheduleZBH2,
    "Interleaved1F1B": ScheduleInterleaved1F1B,
    "LoopedBFS": ScheduleLoopedBFS,
    "InterleavedZeroBubble": ScheduleInterleavedZeroBubble,
    "ZBVZeroBubble": ScheduleZBVZeroBubble,
    "ZBV": ScheduleZBVZeroBubble,
    "V-Half": ScheduleVHalf,
    "V-Min": ScheduleVMin,
    "DualPipe": ScheduleDualPipe,
    "DualPipeV": ScheduleDualPipeV,
    "PipelineScheduleSingle": PipelineScheduleSingle,
    "PipelineScheduleMulti": PipelineScheduleMulti,
}


def get_schedule_class(schedule_name: str) -> type[PipelineSchedule]:
    """The class of a schedule, by torch's name for it or by :func:`plan`'s, upper or lower case alike."""
    for name, schedule in _CLASSES.items():
        if name.lower() == schedule_name.lower():
            return schedule
    raise ValueError(f"schedule_name is {schedule_name!r}, expected one of {', '.join(_CLASSES)}")
