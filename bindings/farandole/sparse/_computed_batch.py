"""A pipeline's batch that is computed: forward, backward and step."""

from __future__ import annotations

import contextlib
from typing import Any, Generic

import torch
from torch import nn

from farandole._C import AccumulationWindow, BatchPipeline, NoGrad, ProfilerRange
from farandole.sparse._caller import Caller
from farandole.sparse._contexts import NOTHING
from farandole.sparse._dense_grads import DenseGrads
from farandole.sparse._losses import outcome_of, share_of_window
from farandole.sparse._open_windows import warn_of_others
from farandole.sparse._options import In, ModelForward, Out
from farandole.sparse._precision import Precision
from farandole.sparse._ranges import OF_BASE, Ranges
from farandole.sparse._stages import Stages
from farandole.sparse._streams import Streams


class ComputedBatch(Generic[In, Out]):
    """What pipelines do with one batch after the other, once it is loaded; a base class, since theirs have parts of it of
    their own. The attributes without a value are made by those."""

    _ranges: Ranges = OF_BASE
    _trains = True
    _was_training: bool | None = None  # in the step before
    _doing = "forward"  # or backward, or step
    _model: nn.Module
    _model_fwd: ModelForward | None
    _optimizer: torch.optim.Optimizer
    _precision: Precision
    _window: AccumulationWindow
    _dense_grads: DenseGrads
    _streams: Streams
    _stages: Stages
    _engine: BatchPipeline

    def _adopt(self, flying: Any) -> None:
        """Before the stages of batches after it."""

    def _may_dist_beside(self, flying: Any) -> bool:
        return False

    def _running(self, flying: Any) -> contextlib.AbstractContextManager[Any]:
        return NOTHING

    def _step_failed(self, batch: str, error: BaseException) -> None:
        """What the others have of an error in ``_doing`` for a batch."""

    def _compute(self, number: int) -> Any:
        flying = self._stages.take(number)
        self._doing = "forward"
        is_training = self._was_training = self._model.training
        if is_training and self._window.is_first:
            warn_of_others(self)
            with ProfilerRange("## zero_grad ##"):
                self._optimizer.zero_grad()
        self._begin_forward(flying)
        with self._syncing() if is_training else NOTHING:
            losses, output = self._forward(flying)
            del flying  # the batch is gone before the backward, whose memory is the most
            self._middle()
            if is_training:
                self._train(losses, number)
        return output

    def _middle(self) -> None:
        """Between forward and backward."""
        self._engine.middle()

    def _after_backward(self) -> None:
        """Before the step, if there is one."""

    def _syncing(self) -> contextlib.AbstractContextManager[Any]:
        return self._dense_grads.syncing(self._model, self._window.is_last)

    def _train(self, losses: torch.Tensor, number: int) -> None:
        """Where it fails the window is over: the next batch begins another one, with zeroed gradients."""
        try:
            self._doing = "backward"
            with ProfilerRange(self._ranges.backward, number):
                self._backward(self._precision.scaled(share_of_window(losses, self._window.size)))
            self._dense_grads.has_run()
            self._after_backward()
            if self._window.is_last:
                self._doing = "step"
                with ProfilerRange(self._ranges.optimizer, number):
                    self._precision.step(self._optimizer)
        except BaseException:
            self._drop_window()
            raise
        self._window.add()

    def _begin_forward(self, flying: Any) -> None:
        with ProfilerRange(self._ranges.wait_for_batch, flying.number):
            self._streams.hand_over(self._streams.copy, flying.batch)
        self._adopt(flying)
        dist_on_thread = self._engine.dist_on_thread
        if dist_on_thread or self._engine.load_on_thread:
            self._stages.caller = Caller()
        self._engine.beside(dist_on_thread and self._may_dist_beside(flying), self._stages.may_load_beside)
        self._stages.given.refuse(flying.number)
        if flying.error is not None:
            raise flying.error

    def _forward(self, flying: Any) -> tuple[torch.Tensor, Any]:
        forward = self._model_fwd or self._model
        has_backward = self._trains and self._model.training
        # Without one, nothing may arm a wrapper for it: torch's DDP would average in the next, whatever no_sync says.
        with (
            ProfilerRange(self._ranges.forward, flying.number),
            NOTHING if has_backward else NoGrad(),
            self._running(flying),
            self._precision.autocast(),
        ):
            result = forward(flying.batch)
        return outcome_of(result, has_backward)

    def _backward(self, losses: torch.Tensor) -> None:
        """torchrec's, which subclasses override.

        Args:
            losses: those of the model, divided by ``grad_accum``; where they are scaled, their scaled sum.
        """
        torch.sum(losses, dim=0).backward()

    def _close_window(self) -> None:
        if self._window.close() == 0:
            return
        self._doing = "step"
        try:
            self._dense_grads.sync()
            self._precision.step(self._optimizer)
        except BaseException as error:
            self._step_failed("the window that the end of the data cut short", error)
            raise

    def _drop_window(self) -> bool:
        """Whether one was open."""
        self._dense_grads.drop()
        return self._window.close() > 0
