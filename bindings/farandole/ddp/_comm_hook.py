"""What a communication hook must look like, as torch's DDP asks for."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

_RESULT = torch.futures.Future[torch.Tensor]
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


def builtin_comm_hook(kind: Any) -> Hook:
    """Torch's hook of that name, whose state is the group."""
    hooks = {
        dist.BuiltinCommHookType.ALLREDUCE: default_hooks.allreduce_hook,
        dist.BuiltinCommHookType.FP16_COMPRESS: default_hooks.fp16_compress_hook,
    }
    if kind not in hooks:
        raise ValueError(f"comm_hook_type={kind!r}: expected torch.distributed.BuiltinCommHookType's, {list(hooks)}")
    return hooks[kind]
