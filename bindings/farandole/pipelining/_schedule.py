"""What all schedules that users step have in common: they prepare microbatches, and hand a plan to C++."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from farandole import _C
from farandole._rank_names import rank_name
from farandole.pipelining import _plans
from farandole.pipelining._captures import check_capturable, is_captured
from farandole.pipelining._devices import channel_of, has_one_queue, is_over_ucx, one_device
from farandole.pipelining._dry_runs import check_declared, is_dry
from farandole.pipelining._forward_context import ForwardsInContext
from farandole.pipelining._grad_sync import GradSync
from farandole.pipelining._inputs import Batch, Inputs, InputSplitter
from farandole.pipelining._loss_weights import LossWeights, loss_scales
from farandole.pipelining._microbatches import merge_outputs
from farandole.pipelining._refusal import RefusesOnAllRanks, refusal
from farandole.pipelining._schedule_config import ScheduleConfig
from farandole.pipelining._sendable import StageCall, plain_loss
from farandole.pipelining._stage import PipelineStage
from farandole.pipelining._stage_edges import Ends, outputs_by_stage, pairs_of, selected_outputs
from farandole.pipelining._step_times import step_times
from farandole.pipelining._torch_actions import torchs_actions


@dataclass
class _Run:
    """A compiled plan for training or for evaluation, and the inputs whose shapes it has learned."""

    executor: _C.PipelineExecutor
    splitter: InputSplitter
    last_microbatches: list[int]  # those whose losses and outputs are made here
    copies: int  # of the model, each with a part of the microbatches
    forwards: list[ForwardsInContext]  # of this rank's stages
    signature: list[Any] | None = None


class PipelineSchedule(metaclass=RefusesOnAllRanks):
    """Runs steps of a plan over the stages of this rank. Made by the classes below it.

    What a constructor refuses on one rank is raised there and, in their next step, as RuntimeError on the others, for
    which that rank waits, up to a minute.
    """

    schedule_name = ""
    """One of :func:`schedule_names`, where the plan has a name."""

    times_device = False
    """Whether steps note when a GPU begins and ends each action, by two events for each: what :func:`gather_timeline` and
    the times of the last step need there. On a CPU they are always known.
    """

    _plan_options: Mapping[str, Any] = {}  # further ones of :func:`plan`

    def __init__(self, stages: list[PipelineStage], config: ScheduleConfig):
        n_microbatches, loss_fn = config.n_microbatches, config.loss_fn
        if isinstance(n_microbatches, bool) or not isinstance(n_microbatches, int) or n_microbatches < 1:
            raise ValueError(f"n_microbatches is {n_microbatches!r}, expected an int of at least 1")
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(f"loss_fn is a {type(loss_fn).__name__}, expected a callable")
        self._stages = sorted(stages, key=lambda stage: stage.stage_index)
        self._take_modules()
        self._never_split: list[bool] = []  # of the stages in what is compiled
        self._device = one_device([stage.device for stage in self._stages])
        self._is_dry = is_dry(self._stages[0].group)
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self._config = config
        self._edges = pairs_of(config.edges)
        self._selected = selected_outputs(config.edges)
        self.scale_grads = config.scale_grads
        self._lowered: dict[bool, _C.Plan] = {}  # by whether it is forward only
        self._runs: dict[bool, _Run] = {}
        self._last_run: _Run | None = None

    @classmethod
    def _group_of_arguments(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        for given in (*args[:1], kwargs.get("stage"), kwargs.get("stages")):
            for stage in given if isinstance(given, (list, tuple)) else [given]:
                if getattr(stage, "group", None) is not None:
                    return stage.group
        return None

    def _take_modules(self) -> None:
        """The stages' modules as they are now, which may have been wrapped or sharded since."""
        self._modules = [stage.submod for stage in self._stages]
        self._grad_syncs = [GradSync.of(module) for module in self._modules]
        for stage, sync in zip(self._stages, self._grad_syncs, strict=True):
            if stage.dw_builder is not None and sync is not None:
                raise NotImplementedError(
                    f"stage {stage.stage_index} has a dw_builder and is wrapped for data parallelism, expected one of "
                    "them: a reduction does not see what is added to .grad after a backward"
                )
            stage.meshes.learn(stage.submod)

    def compute_plan(self, *, forward_only: bool) -> _C.Plan:
        """What each rank runs in which order, with or without communication; the same on all ranks."""
        if not self.schedule_name:
            raise RuntimeError(f"{type(self).__name__} has no plan, expected a schedule_name or an own compute_plan()")
        return _plans.plan(
            self.schedule_name,
            self._stages[0].num_stages,
            self._n_microbatches,
            num_ranks=self._stages[0].group_size,
            forward_only=forward_only,
            edges=self._edges,
            **self._plan_options,
        )

    def step(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        finalize_gradients: bool = True,
        loss_weights: LossWeights | None = None,
        **kwargs: Any,
    ) -> Any:
        """One training step of the whole pipeline: forwards, backwards, gradients in ``.grad``.

        All ranks of the group call it. If any of them fails, all raise.

        On a GPU it may be captured in a CUDA graph, on all ranks, after two steps with the same shapes: what the graph
        replays is what the device did, with the inputs that then are in the same tensors, and ranks no longer agree on
        anything. Not where stages are wrapped for data parallelism, messages go by UCX, or NaN are looked for.

        Args:
            *args: the batch, on the first stage (elsewhere not looked at).
            target: on the last stage, split along dimension 0.
            losses: a list that is cleared and gets the loss of each microbatch, on the last stage.
            return_outputs: whether the last stage collects its outputs.
            loss_kwargs: further keyword arguments of ``loss_fn``.
            arg_mbs, kwarg_mbs, target_mbs: instead of the above, one entry per microbatch.
            finalize_gradients: of stages wrapped for data parallelism: whether this step reduces gradients between
                replicas. Otherwise they add up, as in ``no_sync()``, and a later step reduces those of both; FSDP2
                modules then reshard their parameters, too, and have no ``.grad`` until then. The same on all replicas.
            loss_weights: on the last stage what each microbatch counts for, its rows or tokens, for losses that
                average over them: the gradient of its loss is its part of their sum instead of 1 / n_microbatches, so
                that gradients are those of the mean over the whole batch however it is split. Without ``scale_grads``
                it is the weight itself. All microbatches have one, also where only some of them end on this rank.
            **kwargs: of this rank's stages, split like the batch.

        Returns:
            On the last stage the outputs of all microbatches as one; None elsewhere.

        Raises:
            RuntimeError: a stage failed on some rank. It names rank, stage and microbatch; the
                gradients of the step are undefined, and the next step runs. Where the stage is
                wrapped for data parallelism, its ranks abandon the data-parallel groups whose
                reduction they will not get to: all replicas raise, and the step needs new groups
                and wrappers before it can be repeated.
            ValueError: this rank's arguments do not fit. Other ranks raise RuntimeError.
        """
        batch = Batch(args, kwargs, target, loss_kwargs, arg_mbs, kwarg_mbs, target_mbs)
        return self._run(self._loss_fn is not None, batch, losses, return_outputs, loss_weights, finalize_gradients)

    def eval(
        self,
        *args: Any,
        target: Any = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
        arg_mbs: list[tuple[Any, ...]] | None = None,
        kwarg_mbs: list[dict[str, Any]] | None = None,
        target_mbs: list[Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Forwards only, without gradients; losses if there are targets. Otherwise as :meth:`step`."""
        batch = Batch(args, kwargs, target, loss_kwargs, arg_mbs, kwarg_mbs, target_mbs)
        return self._run(False, batch, losses, return_outputs)

    def plan(self, *, forward_only: bool = False) -> _C.Plan:
        """The plan of all ranks, with communication, as it is executed.

        Raises:
            ValueError: the plan cannot run, with the reason, or is not for these stages and ranks; or it has backwards
                that were not asked for.
        """
        if forward_only not in self._lowered:
            plan = self.compute_plan(forward_only=forward_only)
            _plans.check_computed(plan, type(self).__name__, self._n_microbatches, forward_only)
            channel = channel_of(self._stages[0].group, self._device)
            if plan.has_communication:
                _plans.validate(plan, channel)
            else:
                plan = _plans.lower(plan, channel)
            _plans.check_placement(plan, type(self).__name__, self._stages)
            self._lowered[forward_only] = plan
        return self._lowered[forward_only]

    @property
    def pipeline_order(self) -> dict[int, list[Any]]:
        """By rank what it computes in a step, as torch's actions and in a dict of its own each time."""
        return torchs_actions(self.compute_plan(forward_only=self._loss_fn is None))

    def last_step_trace(self) -> list[tuple[str, float, float]]:
        """What this rank did in the last step: (action, start, end) in seconds from its beginning.

        A compute action begins when its tensors have arrived. On a GPU it is what that did, which is waited for here.

        Raises:
            RuntimeError: the stages are on a GPU, and the step was run without :attr:`times_device`.
        """
        times = step_times(self._last_executor, self._device)
        return [] if times is None else times.actions

    def last_step_bubble(self) -> float:
        """The part of the last step in which this rank did not compute: 0 to 1. On a GPU as :meth:`last_step_trace`."""
        times = step_times(self._last_executor, self._device)
        if times is None or times.seconds == 0:  # it broke
            raise RuntimeError("last_step_bubble() before the first step, or after one that was refused")
        return 1 - times.compute_seconds / times.seconds

    @property
    def _last_executor(self) -> _C.PipelineExecutor | None:
        return None if self._last_run is None else self._last_run.executor

    def _run(
        self,
        train: bool,
        batch: Batch,
        losses: list[Any] | None,
        return_outputs: bool,
        loss_weights: LossWeights | None = None,
        finalize_gradients: bool = True,
    ) -> Any:
        with refusal(self._stages[0].group):
            run = self._last_run = self._compiled(train)
        for sync in self._grad_syncs:
            if sync is not None:
                sync.finalizes = finalize_gradients
        try:
            if train and self._config.backward_requires_autograd and not torch.is_grad_enabled():
                raise RuntimeError("step() was called with gradients disabled, expected them enabled: or call eval()")
            if losses is not None and not isinstance(losses, list):
                raise TypeError(f"losses is a {type(losses).__name__}, expected a list")
            captured = is_captured(self._device)
            if captured:
                self._check_capturable()
            inputs = run.splitter.prepare(batch)
            self._check_targets(train, inputs, losses, run)
            scales = self._loss_scales(loss_weights, run)
        except Exception as error:
            self._refuse(run, error)
            raise
        if run.last_microbatches:
            inputs.outputs = [None] * self._n_microbatches if return_outputs else None
            inputs.losses = [None] * self._n_microbatches if losses is not None else None
        relearn = inputs.signature != run.signature and not self._is_dry
        run.signature = None
        for forward in run.forwards:
            forward.begin_step()
        with contextlib.ExitStack() as stack:
            for sync in self._grad_syncs:
                if sync is not None:
                    stack.enter_context(sync.restored())
            run.executor.time_on_device(self.times_device)
            run.executor.step(
                args=inputs.args,
                kwargs=inputs.kwargs,
                targets=inputs.targets,
                loss_kwargs=inputs.loss_kwargs,
                outputs=inputs.outputs,
                losses=inputs.losses,
                relearn=relearn,
                loss_scales=scales,
                captured=captured,
            )
            # The order in which last backwards mostly come.
            for sync in reversed(self._grad_syncs if train else []):
                if sync is not None:
                    sync.settle()
        run.signature = inputs.signature
        if losses is not None and inputs.losses is not None:
            losses[:] = [inputs.losses[i] for i in run.last_microbatches]
        return (
            None
            if inputs.outputs is None
            else merge_outputs([inputs.outputs[i] for i in run.last_microbatches], self._config.output_merge_spec)
        )

    def _compiled(self, train: bool) -> _Run:
        replaced = any(stage.submod is not taken for stage, taken in zip(self._stages, self._modules, strict=True))
        if replaced or self._last_run is None:
            self._take_modules()
        never_split = [sync is not None and sync.is_never_split for sync in self._grad_syncs]
        if replaced or never_split != self._never_split:
            self._runs.clear()
            self._never_split = never_split
        if train not in self._runs:
            plan = self.plan(forward_only=not train)
            if train:
                _plans.check_trains(plan, type(self).__name__)
            ends, outputs_to = Ends.of(plan), outputs_by_stage(self._selected, plan)
            first = self._stages[0]
            if self._is_dry:
                check_declared(self._stages, ends)
            forwards = [ForwardsInContext(stage, plan) for stage in self._stages]
            indices = ", ".join(str(stage.stage_index) for stage in self._stages)
            described = f"{type(self).__name__} {'step' if train else 'forward only'}, stage {indices}"
            copies = self._n_microbatches // ends.microbatches_of_one_model() if self.scale_grads else 1
            executor = _C.PipelineExecutor(
                plan=plan,
                rank=first.group_rank,
                group=first.group,
                stages=[
                    self._native(stage, forward, sync if train else None, ends, outputs_to.get(stage.stage_index, {}))
                    for stage, forward, sync in zip(self._stages, forwards, self._grad_syncs, strict=True)
                ],
                loss_scale=copies / self._n_microbatches if self.scale_grads else 1.0,
                description=f"{described}, n_microbatches={self._n_microbatches}",
                device=self._device,
                one_queue=has_one_queue(first.group, self._device),
                rank_name=rank_name(first.group),
                shapes_declared=self._is_dry,
                checks_for_nan=self._config.check_for_nan_in_loss_and_grad,
            )
            last = ends.microbatches_that_end_in([stage.stage_index for stage in self._stages])
            splitter = InputSplitter(
                self._stages,
                [stage for stage in self._stages if stage.stage_index in ends.first],
                bool(last),
                self._n_microbatches,
                self._config.args_chunk_spec,
                self._config.kwargs_chunk_spec,
            )
            self._runs[train] = _Run(executor, splitter, last, copies, forwards)
        return self._runs[train]

    def _native(
        self,
        stage: PipelineStage,
        forward: Callable[..., Any],
        sync: GradSync | None,
        ends: Ends,
        outputs_to: dict[int, list[int]],
    ) -> _C.PipelineStage:
        is_first, is_last = stage.stage_index in ends.first, stage.stage_index in ends.last
        return _C.PipelineStage(
            index=stage.stage_index,
            is_first=is_first,
            is_last=is_last,
            module=StageCall(forward, stage.meshes, is_first=is_first, is_last=is_last),
            loss_fn=None if self._loss_fn is None else plain_loss(self._loss_fn),
            declared_inputs=stage.declared_inputs,
            declared_outputs=stage.declared_outputs,
            outputs_to=outputs_to,
            require_grad_sync=sync.require if sync is not None else None,
            abandon_grad_sync=sync.abandon if sync is not None else None,
            dw_builder=stage.dw_builder,
            finish_grad_sync=sync.finish if sync is not None and sync.must_finish else None,
            is_never_split=sync is not None and sync.is_never_split,
        )

    def _check_capturable(self) -> None:
        synced = zip(self._stages, self._grad_syncs, strict=True)
        check_capturable(
            checks_for_nan=self._config.check_for_nan_in_loss_and_grad,
            wrapped=[f"stage {stage.stage_index}" for stage, sync in synced if sync is not None],
            over_ucx=is_over_ucx(self._stages[0].group, self._device),
        )

    def _check_targets(self, train: bool, inputs: Inputs, losses: list[Any] | None, run: _Run) -> None:
        if not run.last_microbatches:
            return
        if inputs.targets is None and (train or (losses is not None and self._loss_fn is not None)):
            raise ValueError("target is None, expected the targets of the batch on the last stage, for loss_fn")
        if self._loss_fn is None and (inputs.targets is not None or losses is not None):
            raise ValueError("target or losses was given, expected neither: the schedule has no loss_fn")

    def _loss_scales(self, weights: LossWeights | None, run: _Run) -> list[float] | None:
        if weights is None or not run.last_microbatches:
            return None
        if self._loss_fn is None:
            raise ValueError("loss_weights was given, expected None: the schedule has no loss_fn")
        return loss_scales(weights, self._n_microbatches, run.copies, self.scale_grads)

    def _refuse(self, run: _Run, error: Exception) -> None:
        # The others are told before this rank raises; what they then see is of no interest here.
        with contextlib.suppress(RuntimeError):
            run.executor.refuse(f"stage {self._stages[0].stage_index}: {type(error).__name__}: {error}")
