"""Communication hooks: what one must look like, as torch's DDP asks for, and that all ranks have the same."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from farandole import _C
from farandole.ddp._agreement import Facts, raising_together
from farandole.ddp._options import Replicas

if TYPE_CHECKING:
    from farandole.ddp._tuning import BucketTuner

_RESULT = torch.futures.Future[torch.Tensor]
_PLAIN = (bool, int, float, str, torch.dtype, type(None))
Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]


def checked_comm_hook(hook: Any) -> Hook:
    """The hook; a TypeError or ValueError that says what is wrong with it."""
    if not callable(hook):
        raise TypeError(f"hook={hook!r}: expected a callable (state, bucket) -> torch.futures.Future[torch.Tensor]")
    try:
        signature = inspect.signature(hook, eval_str=True)
    except Exception:  # annotations that name what is not there say nothing
        signature = inspect.signature(hook)
    if "bucket" not in signature.parameters:
        raise ValueError(f"hook={hook!r} takes {signature}: expected arguments (state, bucket)")
    annotation = signature.parameters["bucket"].annotation
    if annotation not in (inspect.Parameter.empty, dist.GradBucket, "dist.GradBucket"):
        raise ValueError(f"hook={hook!r}: bucket is annotated as {annotation}: expected torch.distributed.GradBucket")
    result = signature.return_annotation
    if result is not inspect.Signature.empty and not isinstance(result, str) and result != _RESULT:
        raise ValueError(f"hook={hook!r} returns {result}: expected torch.futures.Future[torch.Tensor]")

    def checked(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = hook(state, bucket)
        if not isinstance(future, torch._C.Future):  # torch would read None as one
            raise TypeError(
                f"hook={hook!r} returned {type(future).__name__} for bucket {bucket.index()}: expected "
                "torch.futures.Future[torch.Tensor], as dist.all_reduce(..., async_op=True).get_future() gives it"
            )
        return future

    return checked


def facts_of_comm_hook(state: Any, hook: Any) -> Facts:
    """What all ranks must register alike: names, and of torch's own states settings. Others may hold what is a rank's."""
    facts = [("communication hook", " of ".join(_names_of(hook))), ("its state", type(state).__qualname__)]
    if type(state).__module__.startswith("torch."):
        names = {*getattr(state, "__slots__", ()), *getattr(state, "__dict__", ())}
        settings = [(name, getattr(state, name, None)) for name in sorted(names)]
        facts += [(f"its state's {name}", str(value)) for name, value in settings if isinstance(value, _PLAIN)]
    return facts


def _names_of(hook: Any) -> Iterator[str]:
    """Of the hook, then of those that torch's own wrap, as its fp16_compress_wrapper does."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    yield f"{named.__module__}.{named.__qualname__}"
    if str(named.__module__).startswith("torch."):
        wrapped = (cell.cell_contents for cell in getattr(hook, "__closure__", None) or ())
        yield from (name for one in wrapped if callable(one) for name in _names_of(one))


def builtin_comm_hook(kind: Any) -> Hook:
    """Torch's hook of that name, whose state is the group."""
    hooks = {
        dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
        dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    if kind not in hooks:
        raise ValueError(f"comm_hook_type={kind!r}: expected torch.distributed.BuiltinCommHookType's, {list(hooks)}")
    return hooks[kind]


class TakesCommHook:
    """The part of the wrapper that has a hook reduce its buckets."""

    process_group: dist.ProcessGroup
    replicas: Replicas
    device: torch.device
    _reducer: _C.GradReducer
    _tuner: BucketTuner | None

    def register_comm_hook(self, state: object, hook: Callable[..., torch.futures.Future[torch.Tensor]]) -> None:
        """Has ``hook(state, bucket)`` reduce each bucket, a ``torch.distributed.GradBucket``: torch's, e.g. PowerSGD's.

        The bucket holds this rank's gradients, which are not divided by anything; the tensor of the future that the
        hook returns replaces them. Buckets come in index order. A hook must neither wait nor call the model: it runs inside
        of backward, while the reducer is locked. A collective, once, between steps; a ValueError where ranks register
        different ones, with experts in a group of their own, several optimizer instances or a distributed optimizer.
        One that raises for a bucket ends that backward; on some ranks alone, the group is given up (:meth:`abandon`).
        """
        with raising_together((self.replicas.group,), (), self.device) as facts:
            if self._tuner is not None and self._tuner.is_pending:
                raise ValueError("register_comm_hook with bucket_size='auto': expected a number of elements")
            facts += facts_of_comm_hook(state, hook)
            self._reducer.register_comm_hook(state, checked_comm_hook(hook))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        """So one of torch.distributed's ``BuiltinCommHookType``."""
        self.register_comm_hook(self.process_group, builtin_comm_hook(comm_hook_type))
