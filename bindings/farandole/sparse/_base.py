"""The pipeline that loads and copies a batch ahead; others build on it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from farandole._C import AccumulationWindow, BatchPipeline
from farandole.sparse._arguments import (
    device_of,
    group_of,
    refuse_no_bool,
    refuse_no_optimizer,
    refuse_no_window,
    refuse_others_optimizer,
)
from farandole.sparse._caller import Caller
from farandole.sparse._computed_batch import ComputedBatch
from farandole.sparse._dense_grads import DenseGrads
from farandole.sparse._open_windows import note_windows
from farandole.sparse._options import In, ModelForward, Out
from farandole.sparse._other_modes import warn_of_other_mode
from farandole.sparse._precision import Precision
from farandole.sparse._stages import Stages
from farandole.sparse._stop_iteration import as_no_end
from farandole.sparse._streams import Streams
from farandole.sparse._torchrec_arguments import refuse_torchrecs
from farandole.sparse._torchrec_names import of_missing, refuse_overrides


class TrainPipelineBase(ComputedBatch[In, Out]):
    """Copies the next batch to the device beside the forward and backward of this one (torchrec's TrainPipelineBase).

    Args:
        model: returns ``(losses, output)`` for a batch; losses are summed over dim 0 for the backward.
        optimizer: of the parameters that no optimizer fused into the backward has.
        device: where batches go and the model is.
        custom_model_fwd: called in place of the model.
        enable_inplace_copy_batch: torchrec's; False.
        execute_all_batches: False stops where the next batch is missing; the one in flight goes on with the next
            iterator, or is computed by ``flush``.
        enable_amp: autocast around the forward alone, to bfloat16 or to the given dtype.
        enable_grad_scaling: with autocast on CUDA losses are scaled, by a torch.amp.GradScaler whose step and update
            come at the ends of windows. Elsewhere a warning, and no scaling.
        grad_scaler: in place of that one, on any device, with or without autocast. Where gradients of one rank
            overflow, all ranks of ``process_group`` skip the step. When the optimizer steps its gradients are unscaled
            already: clip them in a hook of ``optimizer.register_step_pre_hook``.
        grad_accum: batches in a window of gradient accumulation, None or 1 for none. A window begins at its first
            batch, whose backward zero_grad precedes; losses are divided by ``grad_accum``; the optimizer steps after
            the last one, and without synchronizing (``no_sync``) before. A window that the end of the data cuts short
            steps with what it has, divided as ever. Optimizers that are fused into the backward update at every batch,
            with the divided loss.
        load_on_thread: whether batches are loaded and copied by a thread of the pipeline's own. True says that the
            iterator may run there: is not bound to its thread, and does no collectives that a forward may do beside it.
            None decides by measured times for iterators of torch's DataLoader with worker processes, for which nothing
            but waiting is left (and the batch's ``to``); all others stay on the caller's thread.

    ``progress`` never leaves anything running. Iterators should not draw from torch's global generator beside a model
    that does: they are read ahead.
    """

    _has_dist = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        custom_model_fwd: ModelForward | None = None,
        enable_inplace_copy_batch: bool = False,
        *,
        execute_all_batches: bool = True,
        enable_amp: bool | torch.dtype = False,
        enable_grad_scaling: bool = True,
        grad_scaler: torch.amp.GradScaler | None = None,
        grad_accum: int | None = None,
        process_group: dist.ProcessGroup | None = None,
        load_on_thread: bool | None = None,
    ) -> None:
        refuse_no_window(grad_accum)
        refuse_no_bool("execute_all_batches", execute_all_batches)
        if custom_model_fwd is not None and not callable(custom_model_fwd):
            raise TypeError(f"custom_model_fwd={custom_model_fwd!r}: expected a function of a batch, or None")
        refuse_torchrecs(enable_inplace_copy_batch=enable_inplace_copy_batch)
        if load_on_thread is not None:
            refuse_no_bool("load_on_thread", load_on_thread, ", or None")
        process_group = group_of(process_group)
        self._refuse_optimizer(optimizer)
        self._device = device_of(device)
        self._precision = Precision(self._device, enable_amp, enable_grad_scaling, grad_scaler, process_group)
        self._refuse(model)
        if self._trains:
            refuse_others_optimizer(model, optimizer)
        self._model = model
        self._optimizer = optimizer
        self._window = AccumulationWindow(grad_accum or 1)
        if self._window.size > 1:
            note_windows(self)
        self._dense_grads = DenseGrads()
        self._model_fwd = custom_model_fwd
        self._group = process_group
        self._streams = Streams(self._device)
        self._stages = Stages(
            self._device,
            self._streams,
            process_group,
            self._completes_ahead(),
            custom_model_fwd is not None,
            load_on_thread,
            self._ranges,
        )
        self._execute_all_batches = execute_all_batches
        self._has_ended = False
        self._before = self._began = time.monotonic()  # the last two steps
        self._engine = BatchPipeline(
            self._stages,
            execute_all_batches=execute_all_batches,
            has_dist=self._has_dist,
            completes_ahead=self._completes_ahead(),
            load_on_thread=load_on_thread,
            dist_on_thread=self._dist_on_thread(),
        )
        # What an interrupt has left under way ends before the interpreter does.
        weakref.finalize(self, _clear, weakref.ref(self._engine))

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_overrides(cls)

    if not TYPE_CHECKING:  # which would find no attribute missing

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(of_missing(type(self).__name__, name), name=name, obj=self)

    def progress(self, dataloader_iter: Iterator[In]) -> Out:
        """One batch forward, and where the model is training backward and, at the end of a window, the step. In eval mode
        the forward is in torch.no_grad().

        Returns:
            The output of the model for that batch, undivided.

        Raises:
            StopIteration: the data has ended, here or, where ranks tell each other, on another rank; what other ranks
                had left is in ``unused_batches``. The next call asks the iterator again, which may have begun anew.
            Exception: what the iterator, the copy, input_dist, the model or the optimizer raised, for the batch that
                it is about: those before it have been computed, those after it will be. Other ranks raise a
                RuntimeError that says so, where the batch had not reached its forward. A forward, backward or step that
                fails on some of the ranks of a TrainPipelineSparseDist only is the end of it on all: a RuntimeError with
                the reason, in each call. A StopIteration of any but the iterator is a RuntimeError, as in generators.
            BaseException: what has interrupted a load, KeyboardInterrupt say, after the step that was under way; the
                batch that is lost by it raises a RuntimeError in its turn.
        """
        if not hasattr(dataloader_iter, "__next__"):
            raise TypeError(
                f"progress() takes an iterator, got a {type(dataloader_iter).__name__}: keep iter(...) of it and pass "
                "that each time"
            )
        self._prepare()
        is_new = self._stages.take_from(dataloader_iter)
        if is_new:
            self._stages.unused.clear()
            warn_of_other_mode(self._model, self._was_training, self.in_flight)
        before, has_ended, self._has_ended = len(self._stages.unused), self._has_ended, False
        self._stages.autocast = self._precision.as_now()
        if self._stages.may_load_beside or self._stages.caller is not None:  # a thread that an interrupt has left
            self._stages.caller = Caller()
        self._before, self._began = self._began, time.monotonic()
        try:
            number = self._engine.begin(is_new or has_ended)
        except RuntimeError as error:
            self._stages.raise_interrupt(error)
            raise
        except StopIteration as error:
            raise as_no_end(error) from error
        if number is None:
            self._end_of_data()
            raise StopIteration
        if has_ended:
            del self._stages.unused[:before]
        try:
            output: Out = self._compute(number)
        except BaseException as error:
            error = as_no_end(error)
            self._step_failed(f"batch {number}", error)
            raise error
        finally:
            self._engine.end()
            self._stages.caller = None
            overwritten = self._stages.given.forget(number)
        self._stages.raise_interrupt()
        if overwritten is not None:  # by a load beside its step
            raise overwritten
        return output

    def flush(self) -> list[Out]:
        """Computes the batches in flight, and steps the window of gradient accumulation that is open with what it has: at
        the end of an iterator with ``execute_all_batches=False``, or in the middle of one, which may go on after. With
        ``model.eval()`` forward only, and the window stays open. On all ranks.

        Returns:
            The outputs. Where ranks have different numbers of batches in flight the fewest are computed; the others are
            in ``unused_batches``.

        Raises:
            Exception: as progress(), for one of the batches; another call goes on with those after it.
        """
        outputs: list[Out] = []
        rest: Iterator[In] = iter(())
        all_batches, self._execute_all_batches = self._execute_all_batches, True
        self._engine.set_executes_all_batches(True)
        try:
            while self._has_rest():
                outputs.append(self.progress(rest))
            self._engine.clear()
            self._end_of_data()
        except StopIteration:
            pass
        finally:
            self._execute_all_batches = all_batches
            self._engine.set_executes_all_batches(all_batches)
        return outputs

    @property
    def grad_scaler(self) -> torch.amp.GradScaler | None:
        """What scales the losses, to be saved and loaded with the optimizer; None where nothing does."""
        scaler: torch.amp.GradScaler | None = self._precision.scaler
        return scaler

    @property
    def unused_batches(self) -> list[In]:
        """Batches that were taken from the iterator and not computed, since the data of another rank ended before or
        the pipeline was reset; until the next iterator, or the next batch of this one."""
        return list(self._stages.unused)

    @property
    def in_flight(self) -> int:
        """Batches that are loaded and not computed."""
        return len(self._stages.flying)

    def reset(self) -> None:
        """Forgets the batches in flight, and the window. On all ranks."""
        self._engine.clear()
        self._drop_window()
        self._stages.take_from(iter(()))

    def _has_rest(self) -> bool:
        """In flight, on all ranks; where their exchanges do not tell."""
        return self._stages.agree_on_more(self._stages.has_more)

    def _end_of_data(self) -> None:
        self._has_ended = True
        if self._execute_all_batches and self._model.training:
            self._close_window()

    def _completes_ahead(self) -> bool:
        return False

    def _dist_on_thread(self) -> bool | None:
        return False

    def _prepare(self) -> None:
        pass

    def _refuse_optimizer(self, optimizer: Any) -> None:
        if self._trains:
            refuse_no_optimizer(optimizer)

    def _refuse(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is a {type(model).__name__}: expected a torch.nn.Module")
        self._precision.refuse_fused(model)


def _clear(engine: weakref.ref[BatchPipeline]) -> None:
    alive = engine()
    if alive is not None:
        alive.clear()
