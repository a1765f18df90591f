"""When gradients are reduced and parameters gathered: the config's no_sync_func, grad_sync_func and param_sync_func."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from farandole.megatron._config import StepConfig
from farandole.megatron._ddp import DistributedDataParallel
from farandole.pipelining._grad_sync import GradSync


class StepSync:
    """Of one step: told of each forward and backward of this rank, in their order.

    Args:
        config: of the model.
        models: the rank's chunks.
        pp_rank, pp_size: of the pipeline.
        forwards, backwards: (chunk, microbatch) in the order of the plan.
        num_microbatches: of each chunk.

    ``no_sync_func`` is entered for the step and left for the last backward of a chunk (without a pipeline: from the
    last forward on, which data-parallel wrappers need). With ``grad_sync_func`` it is left where Megatron leaves it, and
    that function is called instead: for one chunk at the end of the step, but on the first stage, whose last backward
    is the last of all; for several, ``pp_rank`` backwards later, which is at the same time on all ranks of a pipeline.
    Wrappers of farandole and torch need none of these: they reduce in the last backward of their chunk.
    """

    def __init__(
        self,
        config: StepConfig,
        models: list[nn.Module],
        pp_rank: int,
        pp_size: int,
        forwards: Sequence[tuple[int, int]],
        backwards: Sequence[tuple[int, int]],
        num_microbatches: int,
    ):
        self._models = models
        self._pp_rank = pp_rank
        self._pp_size = pp_size
        self._forwards = forwards
        self._backwards = backwards
        self._last = num_microbatches - 1
        self._wrappers = [GradSync.of(model) for model in models]
        self._no_sync = _as_list(config.no_sync_func, 1)
        self._is_interleaved = len(models) > 1
        trains = bool(backwards)
        uses_grad_sync = trains and pp_size > 1
        self._grad_sync = _as_list(config.grad_sync_func, len(models)) if uses_grad_sync else []
        uses_param_sync = trains and self._is_interleaved
        self._param_sync = _as_list(config.param_sync_func, len(models)) if uses_param_sync else []
        for name, functions in (("grad_sync_func", self._grad_sync), ("param_sync_func", self._param_sync)):
            if functions and len(functions) != len(models):
                raise ValueError(
                    f"config.{name} has {len(functions)} functions, expected {len(models)} as there are chunks, or one"
                )
        self._contexts: contextlib.ExitStack | None = None
        self._synced: set[int] = set()
        self.forwards_begun = 0
        self._num_backwards = 0

    def wrapped(self) -> list[str]:
        """The chunks whose gradients are reduced between replicas."""
        return [f"chunk {number}" for number, wrapper in enumerate(self._wrappers) if wrapper is not None]

    def begin(self) -> None:
        self._disable()
        for chunk in range(min(2, len(self._param_sync))):
            self._gather(chunk)

    def fail(self, error: BaseException) -> None:
        """The step of this rank ends with an error: wrappers that reduce after it will not, and replicas must not wait."""
        for model in self._models if self._backwards else ():
            for module in model.modules():
                if isinstance(module, DistributedDataParallel):
                    module._abandon_step(f"{type(error).__name__}: {error}")

    def before_forward(self) -> None:
        """Of the next one of the plan."""
        ahead = self.forwards_begun + self._pp_rank
        if self._param_sync and ahead < len(self._forwards) and self._forwards[ahead][1] == 0:
            chunk = self._forwards[ahead][0] + 1
            if 1 < chunk < len(self._models):
                self._gather(chunk)
        if self._pp_size == 1 and self._forwards[self.forwards_begun][1] == self._last:
            self._enable()
        self.forwards_begun += 1

    def before_backward(self) -> None:
        """Of the next one of the plan."""
        chunk, microbatch = self._backwards[self._num_backwards]
        if microbatch != self._last:
            return
        if not self._grad_sync or (not self._is_interleaved and self._pp_rank == 0):
            self._enable()
            self._synced.add(chunk)

    def after_backward(self) -> None:
        if self._is_interleaved:
            behind = self._num_backwards - self._pp_rank
            if self._grad_sync and behind >= 0 and self._backwards[behind][1] == self._last:
                self._reduce(self._backwards[behind][0])
            self._disable()
        self._num_backwards += 1

    def require(self, chunk: int, required: bool) -> None:
        """Whether the wrappers in a chunk reduce in the next backward."""
        wrappers = self._wrappers[chunk]
        if wrappers is not None:
            wrappers.require(required)

    def finish(self, chunk: int) -> None:
        """After the last backward of a chunk."""
        wrappers = self._wrappers[chunk]
        if wrappers is not None and wrappers.must_finish:
            wrappers.finish()

    def abandon(self, chunk: int, reason: str) -> None:
        wrappers = self._wrappers[chunk]
        if wrappers is not None:
            wrappers.abandon(reason)

    def end(self) -> None:
        """Of a step that succeeded: reduces what is left."""
        self.leave()
        for chunk in range(len(self._grad_sync)):
            if chunk not in self._synced:
                self._reduce(chunk)

    def leave(self) -> None:
        """Leaves no_sync_func: of every step, at its end."""
        self._enable()

    def _enable(self) -> None:
        contexts, self._contexts = self._contexts, None
        if contexts is not None:
            contexts.close()

    def _disable(self) -> None:
        if self._contexts is None and self._no_sync:
            self._contexts = contextlib.ExitStack()
            for no_sync in self._no_sync:
                self._contexts.enter_context(no_sync())

    def _reduce(self, chunk: int) -> None:
        self._enable()
        self._grad_sync[chunk](self._models[chunk].parameters())
        self._synced.add(chunk)

    def _gather(self, chunk: int) -> None:
        self._param_sync[chunk](self._models[chunk].parameters())


def _as_list(functions: Any, count: int) -> list[Callable[..., Any]]:
    if functions is None:
        return []
    return list(functions) if isinstance(functions, (list, tuple)) else [functions] * count
