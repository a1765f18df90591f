"""The schedules by their names in torch.distributed.pipelining, and further ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from farandole import _C
from farandole.pipelining import _plans
from farandole.pipelining._schedule import Edge, PipelineSchedule, ScheduleConfig
from farandole.pipelining._stage import PipelineStage


class PipelineScheduleSingle(PipelineSchedule):
    """One stage per rank; rank i of the group runs stage i.

    A subclass names its schedule, or overrides :meth:`compute_plan`.

    Args:
        stage: this rank's stage.
        n_microbatches: into how many a batch is split.
        loss_fn: ``loss_fn(output, target)`` on the last stage, once per microbatch; a tensor of one
            element. Without it, steps are forward only.
        args_chunk_spec, kwargs_chunk_spec, output_merge_spec: as in torch.distributed.pipelining:
            TensorChunkSpec (or, for outputs, reducers) where dimension 0 is not the one.
        scale_grads: divide gradients by n_microbatches, for losses that average. The division is
            part of the backward (the gradient of each loss is 1 / n_microbatches), so that
            gradients of an earlier step that are still there keep their scale.
        edges: where stages are not a chain: for each stage whose output another one takes ``(from, to)``, or
            ``(from, to, outputs)`` where it takes only some of them, by their places in what the module returns; from
            lower to higher stages. A module is called with the tensors of all stages before it, the lowest's first.
            Stages without one before them get the arguments of the step; each microbatch has one last stage.

    Raises:
        ValueError, NotImplementedError: arguments that cannot run, or cannot yet.
    """

    schedule_name = ""
    """One of :func:`schedule_names`."""

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any, ...] | None = None,
        scale_grads: bool = True,
        *,
        edges: Sequence[Edge] | None = None,
    ):
        if not isinstance(stage, PipelineStage):
            raise TypeError(f"stage is a {type(stage).__name__}, expected a farandole.pipelining.PipelineStage")
        if stage.num_stages != stage.group_size:
            raise ValueError(
                f"num_stages is {stage.num_stages}, expected {stage.group_size}: "
                f"{type(self).__name__} runs one stage per rank, and the group has that many"
            )
        config = ScheduleConfig(
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
            edges=edges,
        )
        super().__init__([stage], config)
        if self.schedule_name:
            self.plan(forward_only=loss_fn is None)  # what cannot run is refused now

    def compute_plan(self, *, forward_only: bool) -> _C.Plan:
        return _plans.plan(
            self.schedule_name,
            self._stages[0].num_stages,
            self._n_microbatches,
            forward_only=forward_only,
            edges=self._edges,
        )


class PipelineScheduleMulti(PipelineSchedule):
    """Any number of stages per rank, placed as the plan says.

    A subclass names its schedule, or overrides :meth:`compute_plan`, or fills ``pipeline_order`` as torch's do: by rank
    a list of actions, torch's or their texts. :meth:`load_csv` replaces the plan.

    Args:
        stages: this rank's stages, in any order.
        backward_requires_autograd: whether :meth:`step` refuses to run with gradients disabled.

    The others as for :class:`PipelineScheduleSingle`. All stages of a rank are called with the keyword arguments
    that the rank gives.
    """

    schedule_name = ""
    """One of :func:`schedule_names`."""

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
        *,
        edges: Sequence[Edge] | None = None,
    ):
        _check_stages(stages)
        config = ScheduleConfig(
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
            backward_requires_autograd,
            edges,
        )
        super().__init__(stages, config)
        self._plan: _C.Plan | None = None
        self.pipeline_order: dict[int, list[Any]] = {}
        if self.schedule_name:
            self.plan(forward_only=loss_fn is None)  # what cannot run is refused now

    def compute_plan(self, *, forward_only: bool) -> _C.Plan:
        plan = self._plan
        if plan is None and self.pipeline_order:
            plan = _plan_of_order(self.pipeline_order, self._edges)
        if plan is not None:
            return plan.forwards() if forward_only else plan
        if not self.schedule_name:
            raise RuntimeError(
                f"{type(self).__name__} has no plan, expected pipeline_order, load_csv() or an own compute_plan()"
            )
        first = self._stages[0]
        return self._named_plan(first.num_stages, first.group_size, forward_only)

    def load_csv(self, filename: str | Path, format: str = "compute_only") -> None:
        """Takes the plan of torch.distributed.pipelining's CSV: a line per rank, an action per cell.

        Args:
            filename: of the file, the same on all ranks.
            format: "compute_only", where the communication is inserted, or "compute_comms", where it is there already.

        Raises:
            ValueError: the plan is wrong, or not for these stages, ranks and microbatches.
        """
        if format not in ("compute_only", "compute_comms"):
            raise ValueError(f"format is {format!r}, expected 'compute_only' or 'compute_comms'")
        plan = _C.Plan.from_csv(Path(filename).read_text(), edges=self._edges)
        if plan.has_communication != (format == "compute_comms"):
            raise ValueError(
                f"{filename} has {'' if plan.has_communication else 'no '}communication, expected it "
                f"{'with' if format == 'compute_comms' else 'without'}, as format={format!r} says"
            )
        self._use(plan)

    _load_csv = load_csv  # torch's name

    def _use(self, plan: _C.Plan) -> None:
        if plan.num_microbatches != self._n_microbatches:
            raise ValueError(
                f"the plan has {plan.num_microbatches} microbatches, expected n_microbatches={self._n_microbatches}"
            )
        before = self._plan, self._lowered
        self._plan, self._lowered = plan, {}
        try:
            self.plan(forward_only=self._loss_fn is None)
        except ValueError:
            self._plan, self._lowered = before
            raise
        self._runs.clear()

    def _named_plan(self, num_stages: int, num_ranks: int, forward_only: bool) -> _C.Plan:
        return _plans.plan(
            self.schedule_name,
            num_stages,
            self._n_microbatches,
            num_ranks=num_ranks,
            forward_only=forward_only,
            edges=self._edges,
        )


def _plan_of_order(order: dict[int, list[Any]], edges: list[tuple[int, int]] | None) -> _C.Plan:
    if sorted(order) != list(range(len(order))):
        raise ValueError(f"pipeline_order has the ranks {sorted(order)}, expected 0 to {len(order) - 1}")
    rows = [[str(action) for action in order[rank] if action is not None] for rank in range(len(order))]
    return _C.Plan.from_csv("\n".join(",".join(row) for row in rows), edges=edges)


def _check_stages(stages: Any) -> None:
    if not isinstance(stages, (list, tuple)) or not stages:
        raise TypeError(f"stages is {stages!r}, expected a list of at least one farandole.pipelining.PipelineStage")
    for i, stage in enumerate(stages):
        if not isinstance(stage, PipelineStage):
            raise TypeError(f"stages[{i}] is a {type(stage).__name__}, expected a farandole.pipelining.PipelineStage")
        if stage.num_stages != stages[0].num_stages or stage.group is not stages[0].group:
            raise ValueError(f"stages[{i}] has another num_stages or group than stages[0], expected the same")
    indices = [stage.stage_index for stage in stages]
    if len(set(indices)) != len(indices):
        raise ValueError(f"stages have the indices {indices}, expected each stage once")


class ScheduleFromPlan(PipelineScheduleMulti):
    """Runs a plan of the user's: from :func:`auto_plan`, ``Plan.from_csv``, ``Plan.from_actions`` or any function.

    Args:
        stages: this rank's stages, in any order.
        plan: with or without communication; the same on all ranks.
        outputs_to: of stages that do not give all that they return to a stage: by (from, to) the places of what they
            do give it.

    The others as for :class:`PipelineScheduleMulti`; the number of microbatches is the plan's.

    Raises:
        ValueError: the plan cannot run, or places other stages on this rank.
    """

    def __init__(
        self,
        stages: list[PipelineStage],
        plan: _C.Plan,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any, ...] | None = None,
        scale_grads: bool = True,
        *,
        outputs_to: dict[tuple[int, int], Sequence[int]] | None = None,
    ):
        if not isinstance(plan, _C.Plan):
            raise TypeError(f"plan is a {type(plan).__name__}, expected a farandole.pipelining.Plan")
        super().__init__(
            stages,
            plan.num_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
            edges=[(*edge, outputs) for edge, outputs in (outputs_to or {}).items()] or None,
        )
        self._use(plan)


class ScheduleGPipe(PipelineScheduleSingle):
    """All forwards, then all backwards (GPipe, Huang et al. 2019). Activations of all microbatches live at once."""

    schedule_name = "GPipe"


class Schedule1F1B(PipelineScheduleSingle):
    """One forward, one backward once the pipeline is full (PipeDream-Flush, Narayanan et al. 2021).

    Stage s of p keeps the activations of at most p - s microbatches. Any number of microbatches runs.
    """

    schedule_name = "1F1B"


class ScheduleZBH1(PipelineScheduleSingle):
    """1F1B whose gradients of weights fill the bubble (ZB-H1, Qi et al. 2023), with the memory of 1F1B."""

    schedule_name = "ZB-H1"


class ScheduleZBH2(PipelineScheduleSingle):
    """ZB-H1 with a longer warm-up: next to no bubble, for about twice the activations (ZB-H2, Qi et al. 2023)."""

    schedule_name = "ZB-H2"


class ScheduleInterleaved1F1B(PipelineScheduleMulti):
    """1F1B over several stages per rank, i, i + p, ... on rank i: a smaller bubble (Narayanan et al. 2021).

    Args:
        microbatch_group: microbatches that a rank runs through one of its stages before it goes on to the next one
            (Megatron-LM's microbatch_group_size_per_vp_stage); as many as ranks by default.

    The others as for :class:`PipelineScheduleMulti`. Any number of microbatches runs.
    """

    schedule_name = "Interleaved1F1B"

    def __init__(self, *args: Any, microbatch_group: int | None = None, **kwargs: Any):
        self._microbatch_group = microbatch_group
        super().__init__(*args, **kwargs)

    def _named_plan(self, num_stages: int, num_ranks: int, forward_only: bool) -> _C.Plan:
        return _plans.plan(
            self.schedule_name,
            num_stages,
            self._n_microbatches,
            num_ranks=num_ranks,
            forward_only=forward_only,
            microbatch_group=self._microbatch_group,
            edges=self._edges,
        )


class ScheduleLoopedBFS(PipelineScheduleMulti):
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
        *,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        edges: Sequence[Edge] | None = None,
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
            edges=edges,
        )


class ScheduleInterleavedZeroBubble(PipelineScheduleMulti):
    """Interleaved 1F1B whose gradients of weights fill the bubble (Qi et al. 2023)."""

    schedule_name = "InterleavedZeroBubble"


class ScheduleZBVZeroBubble(PipelineScheduleMulti):
    """Two stages per rank in a V, i and 2p - 1 - i: next to no bubble with the memory of 1F1B (ZBV, Qi et al. 2023)."""

    schedule_name = "ZBV"


class ScheduleVHalf(PipelineScheduleMulti):
    """Two stages per rank in a V, with about half the activations of 1F1B (V-Half, Qi et al. 2024)."""

    schedule_name = "V-Half"


class ScheduleVMin(PipelineScheduleMulti):
    """Two stages per rank in a V, with about a third of the activations of 1F1B (V-Min, Qi et al. 2024)."""

    schedule_name = "V-Min"


class ScheduleDualPipeV(PipelineScheduleMulti):
    """Two stages per rank in a V, forwards beside backwards (DualPipeV, after DeepSeek-V3's DualPipe)."""

    schedule_name = "DualPipeV"


class ScheduleDualPipe(PipelineScheduleMulti):
    """Two copies of a model in opposite directions (DualPipe, DeepSeek-V3 2024).

    Rank i of p has stage i, of the first copy, and stage 2p - 1 - i, which is stage p - 1 - i of the second:
    ``num_stages`` is 2p. The first half of the microbatches runs through the first copy, from rank 0 on, the second
    half through the other one, from rank p - 1 on. Both these ranks give the whole batch and all targets, and each has
    the losses and outputs of the microbatches that end there.

    With ``scale_grads`` a copy's gradients are means over its half of the microbatches: with both copies of a stage
    wrapped for data parallelism over the two ranks that have them (i and p - 1 - i, a group for each stage; both ranks
    wrap the stages in the same order), they become means over the batch.
    """

    schedule_name = "DualPipe"


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
