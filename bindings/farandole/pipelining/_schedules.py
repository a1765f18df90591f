"""The schedules that users step: they prepare microbatches, and hand a compiled plan to C++."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from farandole import _C
from farandole.pipelining import _plans
from farandole.pipelining._grad_sync import GradSync
from farandole.pipelining._inputs import Batch, Inputs, InputSplitter
from farandole.pipelining._microbatches import merge_outputs
from farandole.pipelining._stage import PipelineStage


@dataclass
class _Run:
    """A compiled plan for training or for evaluation, and the inputs whose shapes it has learned."""

    executor: _C.PipelineExecutor
    signature: list[Any] | None = None


class _Schedule:
    """One stage per rank; rank i of the group runs stage i.

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

    Raises:
        ValueError, NotImplementedError: arguments that cannot run, or cannot yet.
    """

    _name = ""

    def __init__(
        self,
        stage: PipelineStage,
        n_microbatches: int,
        loss_fn: Callable[..., torch.Tensor] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any, ...] | None = None,
        scale_grads: bool = True,
    ):
        if not isinstance(stage, PipelineStage):
            raise TypeError(f"stage is a {type(stage).__name__}, expected a farandole.pipelining.PipelineStage")
        if isinstance(n_microbatches, bool) or not isinstance(n_microbatches, int) or n_microbatches < 1:
            raise ValueError(f"n_microbatches is {n_microbatches!r}, expected an int of at least 1")
        if loss_fn is not None and not callable(loss_fn):
            raise TypeError(f"loss_fn is a {type(loss_fn).__name__}, expected a callable")
        if stage.num_stages != stage.group_size:
            raise ValueError(
                f"num_stages is {stage.num_stages}, expected {stage.group_size}: "
                f"{type(self).__name__} runs one stage per rank, and the group has that many"
            )
        if stage.stage_index != stage.group_rank:
            raise ValueError(
                f"stage_index is {stage.stage_index}, expected {stage.group_rank}: "
                f"{type(self).__name__} runs stage i on rank i of the group"
            )
        self._stage = stage
        self._grad_sync = GradSync.of(stage.submod)
        self._n_microbatches = n_microbatches
        self._loss_fn = loss_fn
        self._splitter = InputSplitter(stage, n_microbatches, args_chunk_spec, kwargs_chunk_spec)
        self._output_merge_spec = output_merge_spec
        self.scale_grads = scale_grads
        self._runs: dict[bool, _Run] = {}
        self._last_run: _Run | None = None

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
        **kwargs: Any,
    ) -> Any:
        """One training step of the whole pipeline: forwards, backwards, gradients in ``.grad``.

        All ranks of the group call it. If any of them fails, all raise.

        Args:
            *args: the batch, on the first stage (elsewhere not looked at).
            target: on the last stage, split along dimension 0.
            losses: a list that is cleared and gets the loss of each microbatch, on the last stage.
            return_outputs: whether the last stage collects its outputs.
            loss_kwargs: further keyword arguments of ``loss_fn``.
            arg_mbs, kwarg_mbs, target_mbs: instead of the above, one entry per microbatch.
            finalize_gradients: of FSDP modules, which are not supported: nothing depends on it.
            **kwargs: of this rank's stage, split like the batch.

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
        return self._run(self._loss_fn is not None, batch, losses, return_outputs)

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
        """The plan of all ranks, with communication, as it is executed."""
        stage = self._stage
        return _plans.lower(
            _plans.plan(
                self._name,
                stage.num_stages,
                self._n_microbatches,
                num_ranks=stage.group_size,
                forward_only=forward_only,
            )
        )

    def last_step_trace(self) -> list[tuple[str, float, float]]:
        """What this rank did in the last step: (action, start, end) in seconds from its beginning.

        A compute action begins when its tensors have arrived.
        """
        return [] if self._last_run is None else self._last_run.executor.last_step_trace()

    def last_step_bubble(self) -> float:
        """The part of the last step in which this rank did not compute: 0 to 1."""
        if self._last_run is None or self._last_run.executor.last_step_seconds == 0:
            raise RuntimeError("last_step_bubble() before the first step that succeeded")
        executor = self._last_run.executor
        return 1 - executor.last_compute_seconds / executor.last_step_seconds

    def _run(self, train: bool, batch: Batch, losses: list[Any] | None, return_outputs: bool) -> Any:
        run = self._last_run = self._compiled(train)
        try:
            if train and not torch.is_grad_enabled():
                raise RuntimeError("step() was called with gradients disabled, expected them enabled: or call eval()")
            if losses is not None and not isinstance(losses, list):
                raise TypeError(f"losses is a {type(losses).__name__}, expected a list")
            inputs = self._splitter.prepare(batch)
            self._check_targets(train, inputs, losses)
        except Exception as error:
            self._refuse(run, error)
            raise
        if self._stage.is_last:
            inputs.outputs = [None] * self._n_microbatches if return_outputs else None
            inputs.losses = [None] * self._n_microbatches if losses is not None else None
        relearn = inputs.signature != run.signature
        run.signature = None
        run.executor.step(
            args=inputs.args,
            kwargs=inputs.kwargs,
            targets=inputs.targets,
            loss_kwargs=inputs.loss_kwargs,
            outputs=inputs.outputs,
            losses=inputs.losses,
            relearn=relearn,
        )
        run.signature = inputs.signature
        if losses is not None and inputs.losses is not None:
            losses[:] = inputs.losses
        return None if inputs.outputs is None else merge_outputs(inputs.outputs, self._output_merge_spec)

    def _compiled(self, train: bool) -> _Run:
        if train not in self._runs:
            stage, count = self._stage, self._n_microbatches
            sync = self._grad_sync if train else None
            described = f"{type(self).__name__} {'step' if train else 'forward only'}, stage {stage.stage_index}"
            native = _C.PipelineStage(
                index=stage.stage_index,
                is_first=stage.is_first,
                is_last=stage.is_last,
                module=stage.submod,
                loss_fn=self._loss_fn,
                declared_inputs=stage.declared_inputs,
                declared_outputs=stage.declared_outputs,
                require_grad_sync=sync.require if sync is not None else None,
                abandon_grad_sync=sync.abandon if sync is not None else None,
            )
            executor = _C.PipelineExecutor(
                plan=self.plan(forward_only=not train),
                rank=stage.group_rank,
                group=stage.group,
                stages=[native],
                loss_scale=1 / count if self.scale_grads else 1.0,
                description=f"{described}, n_microbatches={count}",
                rank_name=_rank_name(stage),
            )
            self._runs[train] = _Run(executor)
        return self._runs[train]

    def _check_targets(self, train: bool, inputs: Inputs, losses: list[Any] | None) -> None:
        if not self._stage.is_last:
            return
        if inputs.targets is None and (train or (losses is not None and self._loss_fn is not None)):
            raise ValueError("target is None, expected the targets of the batch on the last stage, for loss_fn")
        if self._loss_fn is None and (inputs.targets is not None or losses is not None):
            raise ValueError("target or losses was given, expected neither: the schedule has no loss_fn")

    def _refuse(self, run: _Run, error: Exception) -> None:
        # The others are told before this rank raises; what they then see is of no interest here.
        with contextlib.suppress(RuntimeError):
            run.executor.refuse(f"stage {self._stage.stage_index}: {type(error).__name__}: {error}")


def _rank_name(stage: PipelineStage) -> str:
    # Several pipelines have a rank 0: an error that crosses over to another one must tell which.
    rank = dist.get_rank()
    return f"rank {stage.group_rank}" + ("" if rank == stage.group_rank else f" (global rank {rank})")


class ScheduleGPipe(_Schedule):
    """All forwards, then all backwards (GPipe, Huang et al. 2019). Activations of all microbatches live at once."""

    _name = "GPipe"


class Schedule1F1B(_Schedule):
    """One forward, one backward once the pipeline is full (PipeDream-Flush, Narayanan et al. 2021).

    Stage s of p keeps the activations of at most p - s microbatches. Any number of microbatches runs.
    """

    _name = "1F1B"
