"""Where torch.compile has a say in what runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._C._dynamo import eval_frame

if TYPE_CHECKING:
    from farandole.ddp._reads import ReadRecorder


def calls_may_be_compiled() -> bool:
    """Whether what the caller calls may be compiled code, since the caller is, or was called by what is."""
    return torch.compiler.is_compiling() or callable(eval_frame.get_eval_frame_callback())


def is_compiled_in_place(module: torch.nn.Module) -> bool:
    """By its ``compile()``: what comes before its forward, hooks too, is compiled with that."""
    return getattr(module, "_compiled_call_impl", None) is not None


def is_opaque(module: torch.nn.Module) -> bool:
    """Whether hooks on what is inside it would be compiled away, or cut its graph."""
    return isinstance(module, torch._dynamo.OptimizedModule) or is_compiled_in_place(module)


def can_have_hooks(module: torch.nn.Module) -> bool:
    return not isinstance(module, torch.jit.ScriptModule)


def called_modules(root: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Modules that can have hooks, each once."""
    seen = {root}
    stack = [root]
    while stack:
        module = stack.pop()
        yield module
        if is_opaque(module):
            continue
        for child in module.children():
            if child not in seen and can_have_hooks(child) and not is_compiled_in_place(child):
                seen.add(child)
                stack.append(child)


class Unwatched:
    """From now on until ``remove()`` a recorder does not see what such a module calls, which would be compiled anew for
    that."""

    def __init__(self, module: Any, recorder: ReadRecorder) -> None:
        self._module = module
        self._call: Callable[..., Any] = module._compiled_call_impl
        module._compiled_call_impl = self._called
        self._recorder = recorder

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        self._recorder.begin(self._module, True)
        try:
            return self._call(*args, **kwargs)
        finally:
            self._recorder.end(self._module)

    def remove(self) -> None:
        self._module._compiled_call_impl = self._call
