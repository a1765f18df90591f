"""Data parallelism: gradients averaged over a process group while backward still runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from farandole import _C

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(torch.nn.Module):
    """Wraps a module so that each backward leaves the average gradient over the group in ``.grad``.

    Gradients live in contiguous buffers, laid out in reverse registration order (as Megatron-core's) and cut into
    buckets. Hooks in C++ issue the all-reduce of a bucket, in index order, as soon as its gradients are there, while
    the rest of backward runs; ``backward()`` returns when all are done. The result is that of
    ``torch.nn.parallel.DistributedDataParallel``: the sum over ranks of gradients scaled by 1 / size. Each trainable
    parameter gets a ``main_grad``, its part of the buffer; after a backward its ``.grad`` is that very tensor. It may
    be set to None, zeroed or replaced between steps.

    Constructing is a collective: all ranks must bring the same module (names, shapes, types, what is frozen) and the
    same options, else a ValueError on every rank names the first difference. Parameters and buffers are then
    overwritten with those of rank 0. Buffers are not synchronized again later.

    Args:
        module: with at least one parameter that requires a gradient, all of these on one device.
        process_group: over which to average; by default the world.
        bucket_size: elements after which a bucket is closed; by default max(40e6, 1e6 x size). Smaller models than
            that overlap nothing unless this is smaller, too.
        unused_parameters: what to do about a parameter that gets no gradient in a backward that synchronizes. Its
            bucket is reduced with what it holds, so that no rank hangs; then "error" raises a RuntimeError from
            ``backward()`` that names it, on the rank where it happened; "zero_fill" goes on, and ``.grad`` is the
            average with zero in its place.

    A backward that raised, in a module's own code for example, leaves other ranks waiting until the next forward,
    which ends the reduction, raises a RuntimeError that says so, and leaves the group usable. Where there may be no
    next forward, run each step inside :meth:`abandon_on_error`, or call :meth:`abandon`; ``farandole.pipelining`` does.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        process_group: dist.ProcessGroup | None = None,
        *,
        bucket_size: int | None = None,
        unused_parameters: str = "error",
    ) -> None:
        super().__init__()
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module is a {type(module).__name__}: expected a torch.nn.Module")
        if unused_parameters not in ("error", "zero_fill"):
            raise ValueError(f"unused_parameters={unused_parameters!r}: expected 'error' or 'zero_fill'")
        if process_group is None:
            process_group = dist.group.WORLD
            if process_group is None:
                raise ValueError("process_group=None: expected a group, or init_process_group to have been called")
        elif not isinstance(process_group, dist.ProcessGroup):
            raise ValueError(
                f"process_group={process_group!r}: expected a ProcessGroup that this rank ({dist.get_rank()}) is in"
            )
        self.module = module
        self.process_group = process_group
        self.require_backward_grad_sync = True
        self._no_sync_depth = 0
        self._reducer = _C.GradReducer(
            process_group,
            list(module.named_parameters()),
            list(module.named_buffers()),
            bucket_size,
            getattr(_C.UnusedParameters, unused_parameters),
        )
        main_grads = dict(self._reducer.main_grads())
        for name, parameter in module.named_parameters():
            if name in main_grads:
                parameter.main_grad = main_grads[name]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self._reducer.prepare_forward(self.require_backward_grad_sync)
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of forwards inside it accumulate locally; the first backward whose forward was outside averages all.

        The forward decides, as in torch: a backward may be outside.
        """
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = False
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1
            self.require_backward_grad_sync = before

    def _set_require_sync(self, require: bool) -> None:
        """Decides whether the next backward averages: for callers that run several per step. no_sync wins over it."""
        self.require_backward_grad_sync = require and self._no_sync_depth == 0
        self._reducer.set_require_sync(self.require_backward_grad_sync)

    def abandon(self, reason: str) -> None:
        """Gives the group up, for a rank that failed and will not reduce the gradients that the others reduce.

        Every rank of the group that waits for the reduction, or comes to it, gets a RuntimeError at once that names
        this rank and the reason. The group is aborted, for whoever else uses it, too; from then on this wrapper's
        forward raises, and gradients are left alone: wrap the module again, over a new group. The first reason given
        counts.

        What the others learn at once depends on the backend: farandole tells all ranks. Gloo has no abort; a rank
        that waits looks every 200 ms whether the group was given up, and the operation that is left behind keeps a
        thread until the group's timeout. Over other backends ranks that already wait may do so until the timeout,
        and then raise with the reason.
        """
        rank, group_rank = dist.get_rank(), dist.get_rank(self.process_group)
        named = f"rank {group_rank}" + ("" if rank == group_rank else f" (global rank {rank})")
        self._reducer.abandon(f"{named} abandoned the data-parallel group: {reason}")

    @contextlib.contextmanager
    def abandon_on_error(self) -> Iterator[None]:
        """Calls :meth:`abandon` when what is inside raises, and lets the error pass.

        For a whole step, forward and backward: ``with model.abandon_on_error(): loss_fn(model(x), y).backward()``.
        An error after which all ranks are still in step (parameters that got no gradient) abandons nothing.
        """
        self._reducer.begin_step()
        try:
            yield
        except BaseException as error:
            if not self._reducer.is_synchronized():
                self.abandon(f"{type(error).__name__}: {error}")
            raise

    def _abandon_step(self, reason: str) -> None:
        """For a caller of _set_require_sync: abandons the group unless this step has reduced, or is not to."""
        if self._no_sync_depth == 0 and not self._reducer.is_synchronized():
            self.abandon(reason)

    def start_grad_sync(self) -> None:
        """Starts to average what has accumulated, for backwards that ran without synchronizing."""
        self._reducer.start_sync()

    def finish_grad_sync(self) -> None:
        """Waits for start_grad_sync; does nothing when no synchronization is open."""
        self._reducer.finish_sync()

    def zero_grad_buffer(self) -> None:
        """Zeroes every ``main_grad``, and with it every ``.grad`` that is one, by one kernel per buffer."""
        self._reducer.zero_grad_buffers()

    def bucket_layout(self) -> str:
        """One line per bucket: its buffer, its range in elements, and its parameters by index of registration."""
        return self._reducer.layout()
