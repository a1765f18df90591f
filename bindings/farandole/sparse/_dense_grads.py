"""When the gradients of the dense parameters are summed over ranks."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from farandole.sparse._contexts import NOTHING
from farandole.sparse._sharded import is_fsdp, is_sharded

_have_begun: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class DenseGrads:
    """What windows of gradient accumulation do with the data-parallel wrappers in a model."""

    def __init__(self) -> None:
        self._unsynced: list[Any] = []
        self._begun: list[nn.Module] = []
        self._left: list[Any] = []
        self._model: nn.Module | None = None
        self._known: nn.Module | None = None  # whose wrappers have all begun

    def syncing(self, model: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """For a forward and backward: but for the last of a window, wrappers do not synchronize.

        torch's DDP with a static graph (torchrec's default) has to in its first backward, and does: gradients are then
        averaged in two parts.
        """
        self._begun, self._left = [], []
        if is_last and self._known is model:
            return NOTHING
        stack = contextlib.ExitStack()
        self._model = model
        for wrapper in _wrappers(model):
            if getattr(wrapper, "static_graph", False) and not _has_begun(wrapper):
                self._begun.append(wrapper)
            elif not is_last:
                stack.enter_context(wrapper.no_sync())
                self._left.append(wrapper)
        return stack

    def has_run(self) -> None:
        """The backward is through."""
        if self._begun:
            _have_begun.update(self._begun)
        self._known = self._model
        self._unsynced = self._left

    def drop(self) -> None:
        """The window is over; its gradients are not."""
        self._unsynced = []
        self._known = None

    def sync(self) -> None:
        """Averages what the backwards of a window have left, as a last one would have done.

        Raises:
            NotImplementedError: a wrapper of another kind.
        """
        unsynced, self._unsynced = self._unsynced, []
        for wrapper in unsynced:
            if hasattr(wrapper, "start_grad_sync"):
                wrapper.start_grad_sync()
                wrapper.finish_grad_sync()
            elif isinstance(wrapper, DistributedDataParallel):
                _average(wrapper)
            else:
                raise NotImplementedError(
                    f"the data ended within a window of gradient accumulation, and what a {type(wrapper).__name__} has "
                    "left cannot be synchronized outside a backward: expected torch's DDP or farandole's, batches that "
                    "fill their windows, or execute_all_batches=False, with which a window goes on with the next iterator"
                )


def _has_begun(wrapper: Any) -> bool:
    """Here, or, as torch's DDP notes, elsewhere."""
    return wrapper in _have_begun or getattr(wrapper, "_static_graph_delay_allreduce_enqueued", False)


def _average(wrapper: DistributedDataParallel) -> None:
    group: dist.ProcessGroup = wrapper.process_group
    ignored = wrapper.parameters_to_ignore  # sharded tables, say
    named = wrapper.module.named_parameters()
    parameters = [part for name, part in named if part.requires_grad and name not in ignored]
    if not parameters:
        return
    # Ranks may have used different ones.
    used = torch.tensor([part.grad is not None for part in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(used, dist.ReduceOp.MAX, group=group)
    works = []
    parameters = [part for part, is_used in zip(parameters, used.tolist(), strict=True) if is_used]
    for part in parameters:
        if part.grad is None:
            part.grad = torch.zeros_like(part)
    if wrapper._get_ddp_logging_data().get("comm_hook"):
        _average_by_hook(wrapper, parameters)
        return
    for part in parameters:
        # To the bit what torch does, with gradients that are views of its buckets already and with others.
        if wrapper.gradient_as_bucket_view and part.grad._is_view():
            part.grad.div_(group.size())
        else:
            part.grad.mul_(1.0 / group.size())
        works.append(dist.all_reduce(part.grad, group=group, async_op=True))
    for work in works:
        work.wait()


def _average_by_hook(wrapper: DistributedDataParallel, parameters: list[nn.Parameter]) -> None:
    """In a backward that adds zeros, since torch's DDP calls its communication hook in no other place."""
    with torch.enable_grad():
        views = [part.view_as(part) for part in parameters]
    wrapper.reducer.prepare_for_forward()
    wrapper.reducer.prepare_for_backward(views if wrapper.find_unused_parameters else [])
    torch.autograd.backward(views, [torch.zeros_like(part) for part in parameters])


def _wrappers(model: nn.Module) -> list[Any]:
    """torch's DDP, ours, and others that have no_sync, also those inside of others.

    Not those inside of sharded modules, whose tables may be updated in each backward; nor FSDP's inside of FSDP's, for
    which the outermost speaks.
    """
    found: list[Any] = []
    kinds: dict[type, tuple[bool, bool]] = {}  # whether it has no_sync, and whether it is looked into
    todo, seen = [(model, False)], set()
    while todo:
        module, in_fsdp = todo.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        kind = type(module)
        if kind not in kinds:
            kinds[kind] = hasattr(kind, "no_sync"), hasattr(kind, "no_sync") or not is_sharded(module)
        is_wrapper, is_open = kinds[kind]
        if is_wrapper:
            is_one = is_fsdp(module)
            if not (is_one and in_fsdp):
                found.append(module)
            in_fsdp = in_fsdp or is_one
        if is_open and module._modules:
            todo += [(child, in_fsdp) for child in reversed(module._modules.values()) if child is not None]
    return found
