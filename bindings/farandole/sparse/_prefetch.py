"""The pipeline whose tables' caches take in the rows of a batch before its forward."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn

from farandole._C import NoGrad, ProfilerRange
from farandole.sparse._caches import has_cache, refuse_unlocked
from farandole.sparse._in_flight import InFlight
from farandole.sparse._options import In, Out
from farandole.sparse._ranges import OF_PREFETCH
from farandole.sparse._sparse_dist import TrainPipelineSparseDist
from farandole.sparse._torchrec_arguments import by_name

# torchrec's, after the first three.
_POSITIONS = ("execute_all_batches", "apply_jit", "pipeline_postproc", "custom_model_fwd", "enable_inplace_copy_batch")


class PrefetchTrainPipelineSparseDist(TrainPipelineSparseDist[In, Out]):
    """Three batches in flight, and between the forward and the backward of batch i the caches of sharded modules take in
    the rows that batch i+1 will read (torchrec's PrefetchTrainPipelineSparseDist), on a stream of their own.

    Sharded modules with caches are torchrec's of the kernels FUSED_UVM_CACHING, KEY_VALUE and virtual tables, whose
    fused_params need ``prefetch_pipeline=True``, and others with ``prefetch(ctx=, dist_input=, forward_stream=)``.

    Caches pair prefetches and forwards by their order. So while a batch is prefetched no other forward may run through
    these modules: it raises a RuntimeError. Set ``prefetch_ahead = False`` before the last step ahead of an evaluation,
    ``reset`` or ``detach``, and True after. In eval mode nothing is prefetched.

    Arguments are those of TrainPipelineSparseDist, ``positional`` as torchrec's class has them (execute_all_batches,
    apply_jit, pipeline_postproc, custom_model_fwd, enable_inplace_copy_batch); input_dist has no thread of its own,
    since prefetches follow it.
    """

    _ranges = OF_PREFETCH
    prefetch_ahead: bool = True
    _with_cache: dict[str, Any] | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device | str,
        *positional: Any,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer, device, **by_name(type(self).__name__, _POSITIONS, positional, options))

    def explain(self) -> str:
        told = super().explain()
        assert self._attachment is not None
        cached = ", ".join(name or "the model itself" for name in self._cached())
        return f"{told}\nprefetched: {cached or 'none, no sharded module has a cache'}"

    def drop_prefetched(self) -> None:
        """What was prefetched is gone, since the caches have been made anew: for after a forward that failed before it
        had used it. On all ranks."""
        if self._attachment is not None:
            self._attachment.prefetched.drop()

    def reset(self) -> None:
        self._refuse_prefetched("reset()")
        super().reset()

    def detach(self) -> nn.Module:
        self._refuse_prefetched("detach()")
        return super().detach()

    def _dist_on_thread(self) -> bool | None:
        if self._asked_dist_on_thread:
            raise ValueError("dist_on_thread=True: expected None or False, since prefetches follow the input_dist")
        return False

    def _prepare(self) -> None:
        known = self._attachment
        super()._prepare()
        if self._attachment is known:
            return
        assert self._attachment is not None
        self._with_cache = None
        try:
            for name, module in self._attachment.sharded.items():
                refuse_unlocked(name, module)
        except ValueError:
            self.detach()
            raise
        if not any(map(has_cache, self._attachment.sharded.values())):
            warnings.warn("no sharded module has a cache: nothing is prefetched", stacklevel=4)

    def _begin_forward(self, flying: InFlight) -> None:
        super()._begin_forward(flying)
        if self._model.training:
            self._prefetch_rows(flying)

    def _middle(self) -> None:
        super()._middle()
        if not (self._model.training and self.prefetch_ahead):
            return
        ahead = self._stages.next_sent()
        if ahead is None or self._stages.given.is_overwritten(ahead.number):
            return
        try:
            self._prefetch_rows(ahead)
        except Exception as error:
            ahead.error = error

    def _prefetch_rows(self, flying: InFlight) -> None:
        assert self._attachment is not None
        forward_stream = self._streams.current()
        if flying.is_prefetched or flying.owner is not self._attachment.input_dist:
            return
        flying.is_prefetched = True
        with (
            ProfilerRange("## sharded_module_prefetch ##"),
            self._streams.on(self._streams.prefetch),
            NoGrad(),
        ):
            for name, module in self._cached().items():
                if name in flying.requests:
                    self._stages.complete_one(flying, name, "## _prefetch_embeddings {} ##")
                context, data = flying.contexts[name], flying.data[name]
                self._streams.hand_over(self._streams.dist, context, data)
                self._attachment.prefetched.take(flying, name)
                module.prefetch(ctx=context, dist_input=data, forward_stream=forward_stream)

    def _complete(self, flying: InFlight, name: str) -> tuple[Any, Any]:
        if name in flying.prefetched:
            flying.prefetched.discard(name)
            self._streams.hand_over(self._streams.prefetch)
        return super()._complete(flying, name)

    def _cached(self) -> dict[str, Any]:
        if self._with_cache is None:
            assert self._attachment is not None
            pipelined = self._attachment.pipelined
            if not pipelined:  # none, or not known yet
                return {}
            self._with_cache = {name: module for name, module in pipelined.items() if has_cache(module)}
        return self._with_cache

    def _refuse_prefetched(self, what: str) -> None:
        if self._attachment is not None:
            self._attachment.prefetched.refuse(what)
