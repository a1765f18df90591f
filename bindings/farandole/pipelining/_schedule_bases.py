"""What schedules are made of: one stage on a rank, several, or any plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from farandole import _C
from farandole.pipelining._refusal import PATIENCE, refusal
from farandole.pipelining._schedule import PipelineSchedule
from farandole.pipelining._schedule_config import ScheduleConfig
from farandole.pipelining._stage import PipelineStage
from farandole.pipelining._stage_edges import Edge, edges_of, outputs_by_stage
from farandole.pipelining._torch_stages import as_stage, edges_between


class PipelineScheduleSingle(PipelineSchedule):
    """One stage per rank; rank i of the group runs stage i.

    A subclass names its schedule, or overrides :meth:`compute_plan`.

    Args:
        stage: this rank's stage; torch's are taken, too.
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
            lower to higher stages. A module is called with what all stages before it give, the lowest's first; one of
            which only some outputs are taken returns tensors and nothing else.
            Stages without one before them get the arguments of the step; each microbatch has one last stage. Stages of
            a model that torch's ``pipeline()`` traced bring theirs.
        check_for_nan_in_loss_and_grad: in training, whether a loss, or a gradient that a stage gives to the one before,
            that is NaN or infinite is an error on all ranks, which names stage and microbatch; the next step runs. It
            reads what it checks once more. Not for scaled losses, whose overflow is what the scaler looks for.

    Raises:
        ValueError, NotImplementedError: arguments that cannot run, or cannot yet.
    """

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
        check_for_nan_in_loss_and_grad: bool = False,
    ):
        stage = as_stage(stage)
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
            edges=edges_between([stage], edges),
            check_for_nan_in_loss_and_grad=check_for_nan_in_loss_and_grad,
        )
        super().__init__([stage], config)
        if self.schedule_name:
            self.plan(forward_only=loss_fn is None)  # what cannot run is refused now


class PipelineScheduleMulti(PipelineSchedule):
    """Any number of stages per rank, placed as the plan says.

    A subclass names its schedule, or overrides :meth:`compute_plan`, or fills ``pipeline_order`` as torch's do: by rank
    a list of actions, torch's or their texts. :meth:`load_csv` replaces the plan.

    Args:
        stages: this rank's stages, in any order; torch's are taken, too.
        use_full_backward: torch's of old, not looked at: the plan says which backwards are whole.
        backward_requires_autograd: whether :meth:`step` refuses to run with gradients disabled.

    The others as for :class:`PipelineScheduleSingle`. All stages of a rank are called with the keyword arguments
    that the rank gives.
    """

    def __init__(
        self,
        stages: list[PipelineStage],
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any, ...] | None = None,
        use_full_backward: bool | None = None,
        scale_grads: bool = True,
        backward_requires_autograd: bool = True,
        *,
        edges: Sequence[Edge] | None = None,
        check_for_nan_in_loss_and_grad: bool = False,
    ):
        stages = [as_stage(stage) for stage in stages] if isinstance(stages, (list, tuple)) else stages
        _check_stages(stages)
        config = ScheduleConfig(
            n_microbatches,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
            backward_requires_autograd,
            edges_between(stages, edges),
            check_for_nan_in_loss_and_grad,
        )
        super().__init__(stages, config)
        self._plan: _C.Plan | None = None
        self._order: dict[int, list[Any]] = {}
        if self.schedule_name:
            self.plan(forward_only=loss_fn is None)  # what cannot run is refused now

    def compute_plan(self, *, forward_only: bool) -> _C.Plan:
        plan = self._plan
        if plan is None and self._order:
            plan = _plan_of_order(self._order, *self._graph())
        if plan is not None:
            return plan.forwards() if forward_only else plan
        if not self.schedule_name:
            raise RuntimeError(
                f"{type(self).__name__} has no plan, expected pipeline_order, load_csv() or an own compute_plan()"
            )
        return super().compute_plan(forward_only=forward_only)

    @property
    def _makes_plans(self) -> bool:
        return bool(self.schedule_name) or type(self).compute_plan is not PipelineScheduleMulti.compute_plan

    @property
    def pipeline_order(self) -> dict[int, list[Any]]:
        """By rank its actions, None among them for idle turns. Setting it replaces the plan; fill it before the step.

        Of a schedule that has a plan of another origin it is what that computes, as torch's actions and in a dict of
        its own each time.
        """
        if not self._order and (self._plan is not None or self._makes_plans):
            return super().pipeline_order
        self._forget_plan()  # for whoever fills it in place
        return self._order

    @pipeline_order.setter
    def pipeline_order(self, order: dict[int, list[Any]]) -> None:
        self._order = order
        self._plan = None
        self._forget_plan()

    def _forget_plan(self) -> None:
        self._lowered = {}
        self._runs.clear()

    def load_csv(self, filename: str | Path, format: str = "compute_only") -> None:
        """Takes the plan of torch.distributed.pipelining's CSV: a line per rank, an action per cell.

        What the schedule was given as ``edges`` is the graph of its stages. ``Plan.to_csv`` writes the graph of a plan
        that has one into the file, which is then enough.

        Args:
            filename: of the file, the same on all ranks.
            format: "compute_only", where the communication is inserted, or "compute_comms", where it is there already.

        Raises:
            ValueError: the plan is wrong, or not for these stages, ranks and microbatches, or names other edges than the
                schedule was given.
        """
        with refusal(self._stages[0].group, PATIENCE):
            if format not in ("compute_only", "compute_comms"):
                raise ValueError(f"format is {format!r}, expected 'compute_only' or 'compute_comms'")
            plan = _C.Plan.from_csv(Path(filename).read_text(), None, *self._graph())
            if plan.has_communication != (format == "compute_comms" and plan.num_ranks > 1):
                raise ValueError(
                    f"{filename} has {'' if plan.has_communication else 'no '}communication, expected it "
                    f"{'with' if format == 'compute_comms' else 'without'}, as format={format!r} says"
                )
            self._use(plan)

    def dump_csv(self, filename: str | Path, format: str = "compute_only") -> None:
        """Writes the plan so that :meth:`load_csv` takes it, and torch's what is "compute_only" and of a chain."""
        if format not in ("compute_only", "compute_comms"):
            raise ValueError(f"format is {format!r}, expected 'compute_only' or 'compute_comms'")
        make = self.compute_plan if format == "compute_only" else self.plan
        plan = make(forward_only=self._loss_fn is None)
        if format == "compute_only" and plan.has_communication:
            raise ValueError("the plan was given with its communication, expected format='compute_comms'")
        Path(filename).write_text(plan.to_csv())

    def _validate_and_set_stage_mapping(self, actions: dict[int, list[Any]]) -> None:
        """What subclasses of torch's class call when they have filled ``pipeline_order``.

        Raises:
            ValueError: this order cannot run.
        """
        with refusal(self._stages[0].group, PATIENCE):
            self.pipeline_order = actions
            self.plan(forward_only=self._loss_fn is None)

    _load_csv, _dump_csv = load_csv, dump_csv  # torch's names

    def _graph(self) -> tuple[list[tuple[int, int]] | None, list[tuple[int, int]] | None]:
        """Edges and ranges of microbatches of the plans that are given, where those do not say."""
        return self._edges, None

    def _use(self, plan: _C.Plan) -> None:
        before = self._plan, self._lowered
        self._plan, self._lowered = plan, {}
        try:
            self.plan(forward_only=self._loss_fn is None)
        except ValueError:
            self._plan, self._lowered = before
            raise
        self._runs.clear()


def _plan_of_order(
    order: dict[int, list[Any]], edges: list[tuple[int, int]] | None, ranges: list[tuple[int, int]] | None
) -> _C.Plan:
    if sorted(order) != list(range(len(order))):
        raise ValueError(f"pipeline_order has the ranks {sorted(order)}, expected 0 to {len(order) - 1}")
    rows = [[str(action) for action in order[rank] if action is not None] for rank in range(len(order))]
    return _C.Plan.from_csv("\n".join(",".join(row) for row in rows), None, edges, ranges)


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
        check_for_nan_in_loss_and_grad: bool = False,
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
            scale_grads=scale_grads,
            check_for_nan_in_loss_and_grad=check_for_nan_in_loss_and_grad,
        )
        if self._edges is not None and set(self._edges) != set(edges_of(plan)):
            raise ValueError(
                f"the plan has the edges {edges_of(plan)}, expected {self._edges}: those of the traced model that the "
                "stages are of"
            )
        self._edges = plan.edges
        if outputs_to is not None:
            self._selected = {edge: list(outputs) for edge, outputs in outputs_to.items()}
        outputs_by_stage(self._selected, plan)
        self._use(plan)
