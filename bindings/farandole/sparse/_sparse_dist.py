"""Pipelines whose batches go through the input_dist of sharded modules ahead of the forward."""

from __future__ import annotations

import contextlib
import time
import warnings
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from farandole._C import NoGrad, ProfilerRange, keep_freed_memory
from farandole.sparse._arguments import refuse_no_bool, refuse_no_example, refuse_others_optimizer
from farandole.sparse._attachment import Attachment, attach
from farandole.sparse._base import TrainPipelineBase
from farandole.sparse._joint_steps import PATIENCE
from farandole.sparse._options import In, ModelForward, Options, Out
from farandole.sparse._ranges import OF_EVAL, OF_SPARSE_DIST
from farandole.sparse._running import Running
from farandole.sparse._sharded import is_two_dimensional, unwrap
from farandole.sparse._torchrec_arguments import by_name, refuse_interval, refuse_torchrecs

if TYPE_CHECKING:
    from typing_extensions import Unpack


_LONGEST_PATIENCE = 30.0  # seconds; some of what lies between two steps is no part of them


class TrainPipelineSparseDist(TrainPipelineBase[In, Out]):
    """Three batches in flight: i+2 is loaded and copied, i+1 goes through the input_dist of the model's sharded
    modules, i through forward and backward (torchrec's TrainPipelineSparseDist).

    Args:
        execute_all_batches: False stops where batch i+2 is missing; the two in flight go on with the next iterator, or
            are computed by ``flush``.
        strict: raise where a sharded module cannot be pipelined, instead of a warning.
        tracing: "fx" finds what a batch gives the sharded modules in a graph of the model; "hooks" in the forward of
            the first batch, which is not pipelined; None takes hooks where fx cannot trace the model, and warns.
        example_batch: one with torchrec's ``to_proxy()``, for a forward that decides by parts of a batch, whether one is
            None say: torch.fx sees those that a copy of it does not have ``torch.fx.PH`` for, which are to be so in all
            batches.
        process_group: all ranks that train together; by default all.
        dist_on_thread: whether input_dist runs on a thread of its own; None decides by measured times for torchrec's
            modules, and is False for others, whose collectives may be those of the forward. CPU only.
        agree_on_inputs: the ranks say whether the data of a batch has come to each of them, before any computes it: a
            failure there skips the batch on all ranks, which else wait in its forward or backward for the one that has
            failed. Costs a meeting in each step. CPU only: else a ValueError.
        dmp_collection_sync_interval_batches: of a DMPCollection, whose replicas of tables are averaged (its ``sync()``)
            after the first backward and every so many; None for never.
        apply_jit, context_type, pipeline_postproc, enqueue_batch_after_forward, enable_inplace_copy_batch: torchrec's,
            where they ask for what is done anyway; else a ValueError.

        options: see TrainPipelineBase.

    Ranks that have different numbers of batches end together, after the fewest.
    """

    _has_dist = True
    _ranges = OF_SPARSE_DIST

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        execute_all_batches: bool = True,
        apply_jit: bool = False,
        context_type: type | None = None,
        pipeline_postproc: bool = True,
        custom_model_fwd: ModelForward | None = None,
        dmp_collection_sync_interval_batches: int | None = 1,
        enqueue_batch_after_forward: bool = False,
        enable_inplace_copy_batch: bool = False,
        *,
        strict: bool = False,
        tracing: str | None = None,
        example_batch: In | None = None,
        dist_on_thread: bool | None = None,
        agree_on_inputs: bool = False,
        **options: Unpack[Options],
    ) -> None:
        refuse_torchrecs(
            apply_jit=apply_jit,
            context_type=context_type,
            pipeline_postproc=pipeline_postproc,
            enqueue_batch_after_forward=enqueue_batch_after_forward,
        )
        refuse_interval("dmp_collection_sync_interval_batches", dmp_collection_sync_interval_batches)
        self._sync_interval = dmp_collection_sync_interval_batches
        self._backwards = 0
        self._collections: list[Any] = []  # of torchrec's 2D sharding, in the model
        if tracing not in (None, "fx", "hooks"):
            raise ValueError(f'tracing={tracing!r}: expected "fx", "hooks" or None')
        refuse_no_example(example_batch, tracing)
        refuse_no_bool("strict", strict)
        refuse_no_bool("agree_on_inputs", agree_on_inputs)
        if dist_on_thread is not None:
            refuse_no_bool("dist_on_thread", dist_on_thread, ", or None")
        if agree_on_inputs and torch.device(device).type != "cpu":
            raise ValueError(f"agree_on_inputs=True with device {device}: expected False, or a pipeline on CPU")
        self._asked_dist_on_thread = dist_on_thread
        self._agrees_on_inputs = agree_on_inputs
        super().__init__(
            model,
            optimizer,
            device,
            custom_model_fwd,
            enable_inplace_copy_batch,
            execute_all_batches=execute_all_batches,
            **options,
        )
        if self._device.type == "cpu":
            keep_freed_memory()
        self._strict = strict
        self._tracing = tracing
        self._example_batch = example_batch
        self._attachment: Attachment | None = None
        self._refusal: str | None = None  # what hooks have found, which another unpipelined batch would find again

    def explain(self) -> str:
        """A line for each sharded module: whether it is pipelined, and if not, what prevents it and what to change; and how
        many batches have exchanged their inputs again in their forward, and why, if any have.
        Attaches the model, so that all ranks have to call it."""
        self._prepare()
        assert self._attachment is not None
        verdicts, untraced = self._attachment.verdicts, self._attachment.untraced
        lines = ["the forward of the first batch will tell"] if verdicts is None else [*map(str, verdicts)]
        is_some = self._attachment.is_untraced_on_some
        if untraced and (is_some or verdicts is None or not all(verdict.pipelined for verdict in verdicts)):
            lines.append(f"by hooks, since {untraced}")
        lines += self._attachment.exchanged_again.lines()
        return "\n".join(lines)

    def attach(
        self,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | bool | None = None,
        *,
        sparse_dist: bool = True,
    ) -> None:
        """Takes the model after ``detach``, or another one, with an optimizer of its parameters. On all ranks.

        Another model begins a window of gradient accumulation; one that was open is not stepped, with a warning.
        ``sparse_dist`` is torchrec's, which has it in the place of ``optimizer``; batches in flight are exchanged by the
        time of their forward in any case.

        Raises:
            ValueError: the optimizer has no parameter of that model; or as for a model that a pipeline is made of.
        """
        if optimizer is None or isinstance(optimizer, bool):
            optimizer = self._optimizer
        if model is None:
            model = self._model
        self._refuse(model)
        self._refuse_optimizer(optimizer)
        is_other = unwrap(model)[0] is not unwrap(self._model)[0]
        if is_other and self._trains:
            refuse_others_optimizer(model, optimizer)
        self.detach()
        self._refusal = None
        before = self._model, self._optimizer
        self._model, self._optimizer = model, optimizer
        try:
            self._prepare()
        except BaseException:
            self._model, self._optimizer = before
            raise
        if is_other and self._drop_window():
            warnings.warn(
                "attach() of another model within a window of gradient accumulation: it is not stepped", stacklevel=2
            )

    def detach(self) -> nn.Module:
        """The model as it was, for other uses, once no pipeline is attached to it; batches in flight stay, ``attach`` or
        ``progress`` goes on."""
        if self._attachment is not None:
            self._leave()
            self._attachment = None
        return self._model

    def register_backward_hook(self, site: Any, work: Callable[[Any], object]) -> Any:
        """Calls ``work(pipeline)`` in each backward that comes to a site of torchrec's (``InjectionSite``,
        ``OutputDistSite``), before the gradients of what the site names go on.

        Returns:
            A handle, whose ``remove()`` ends that.

        Raises:
            ValueError: the model has no module of the site's name.
        """
        from torchrec.distributed.train_pipeline.backward_injection import register_backward_hook

        of = weakref.ref(self)

        def run(_: torch.Tensor) -> None:
            if (pipeline := of()) is not None:
                with ProfilerRange(f"## backward_hook {site} ##"):
                    work(pipeline)

        return register_backward_hook(site, unwrap(self._model)[0], run)

    def _after_backward(self) -> None:
        is_due = self._sync_interval is not None and self._backwards % self._sync_interval == 0
        self._backwards += 1
        for collection in self._collections if is_due else ():
            with ProfilerRange("## dmp_collection_sync ##"):
                collection.sync()

    # Others may be later than this rank by what a step takes, and its load.
    def _step_failed(self, batch: str, error: BaseException) -> None:
        if self._attachment is not None:
            is_interrupt = not isinstance(error, Exception)  # KeyboardInterrupt, which is not to be held up
            patience = PATIENCE if is_interrupt else self._patience()
            self._attachment.input_dist.step_failed(self._doing, batch, error, self._model, patience)

    def _patience(self) -> float:
        return min(PATIENCE + 2 * (time.monotonic() - self._before), _LONGEST_PATIENCE)

    def _has_rest(self) -> bool:
        return True  # progress() tells

    def _completes_ahead(self) -> bool:
        return self._agrees_on_inputs

    def _dist_on_thread(self) -> bool | None:
        return self._asked_dist_on_thread if self._device.type == "cpu" else False

    def _may_dist_beside(self, flying: Any) -> bool:
        assert self._attachment is not None
        if flying.owner is not self._attachment.input_dist:  # its own exchange is in its forward, over the same groups
            return False
        if self._attachment.attributes.broadcast:  # in forwards, which set back torch's counts of writes to them
            return False
        return self._attachment.input_dist.may_run_beside(is_promised=self._asked_dist_on_thread is True)

    def _prepare(self) -> None:
        if self._refusal is not None:
            raise ValueError(self._refusal)
        if self._attachment is None:
            asked = self._strict, self._tracing, self._example_batch
            self._attachment = attach(self._model, self._group, self._device, *asked)
            self._leave = weakref.finalize(self, self._attachment.leave)
            self._leave.atexit = False
            self._collections = [module for module in self._model.modules() if is_two_dimensional(module)]
            self._stages.input_dist = self._attachment.input_dist
        self._stages.is_training = self._model.training
        if not self.in_flight:  # whose forwards would see a change
            self._streams.catch_up(self._streams.dist)
        self._attachment.input_dist.renew()
        try:
            self._attachment.prepare()
        except ValueError as error:
            if self._attachment.has_recorded:
                self._refusal = f"{error}\nAfter a change of the model: attach()"
            self.detach()
            raise

    def _adopt(self, flying: Any) -> None:
        assert self._attachment is not None
        if not self._attachment.begin_forward(flying):
            return
        self._streams.catch_up(self._streams.dist)  # with the change
        with self._streams.on(self._streams.dist), self._stages.autocast(), NoGrad():
            self._attachment.adopt(flying, self._patience())

    def _running(self, flying: Any) -> contextlib.AbstractContextManager[Any]:
        assert self._attachment is not None
        if self._streams.dist is not None:
            given = [] if flying.results is None else flying.results.tensors()
            given += [] if flying.read is None else flying.read.copies.values()
            self._streams.hand_over(
                self._streams.dist, flying.results, given, [writes.copies for writes in flying.writes.values()]
            )
        return Running(self._attachment, flying, self._complete)

    def _complete(self, flying: Any, name: str) -> tuple[Any, Any]:
        """What came ahead for a module: its context and its data."""
        if name in flying.requests:
            self._engine.wait_for_data(lambda: self._stages.complete_one(flying, name))
        context, data = flying.contexts.pop(name), flying.data.pop(name)
        self._streams.hand_over(self._streams.dist, context, data)
        return context, data


class EvalPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """Forward only, in torch.no_grad(), whatever the mode of the model (torchrec's EvalPipelineSparseDist).

    Args:
        positional: torchrec's apply_jit and enable_inplace_copy_batch; False.
        options: by name, those of TrainPipelineSparseDist.
    """

    _trains = False
    _ranges = OF_EVAL

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        *positional: Any,
        **options: Any,
    ) -> None:
        names = ("apply_jit", "enable_inplace_copy_batch")
        super().__init__(model, optimizer, device, **by_name(type(self).__name__, names, positional, options))
        if self._window.size > 1:
            raise ValueError(f"grad_accum={self._window.size}: expected None, an evaluation has no windows")

    def _compute(self, number: int) -> Any:
        flying = self._stages.take(number)
        self._doing = "forward"
        self._begin_forward(flying)
        _, output = self._forward(flying)
        del flying
        self._middle()
        return output
