"""Which parameters each module's own code reads, whoever they belong to."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# What tells nothing of a tensor's contents.
_GLANCES = {
    getattr(torch.Tensor, name).__get__
    for name in ("device", "dtype", "grad", "is_leaf", "is_sparse", "layout", "ndim", "requires_grad", "shape")
} | {torch.Tensor.dim, torch.Tensor.element_size, torch.Tensor.numel, torch.Tensor.size, torch.Tensor.stride}


class ReadRecorder(TorchFunctionMode):
    """Sees every call of torch while a forward runs, and which module's forward is the innermost.

    A parameter is known by its memory: views of it that were made before count, too. Compiled modules are not looked
    into. Costs microseconds a call: for one forward.
    """

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.read: dict[torch.nn.Module, set[torch.Tensor]] = {}
        self._ranges = sorted(
            ((p.data_ptr(), p.data_ptr() + p.numel() * p.element_size(), p) for p in parameters if p.numel() > 0),
            key=lambda found: found[0],
        )
        self._begins = [begin for begin, _, _ in self._ranges]
        self._stack: list[torch.nn.Module] = []
        self._suspended = False

    def begin(self, module: torch.nn.Module, is_opaque: bool) -> None:
        """Its forward is called."""
        self._stack.append(module)
        if is_opaque and not self._suspended and self._is_innermost():
            self.__exit__(None, None, None)
            self._suspended = True

    def end(self, module: torch.nn.Module) -> None:
        while self._stack and self._stack.pop() is not module:
            pass  # its forward raised
        if self._suspended:
            self._suspended = False
            self.__enter__()

    def stop(self) -> None:
        self._stack.clear()
        if not self._suspended and self._is_innermost():  # else it does nothing from now on
            self.__exit__(None, None, None)

    def _is_innermost(self) -> bool:
        depth = torch._C._len_torch_function_stack()
        return depth > 0 and torch._C._get_function_stack_at(depth - 1) is self

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._stack and func not in _GLANCES:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor):
                    self._see(leaf)
        return func(*args, **kwargs)

    def _see(self, tensor: torch.Tensor) -> None:
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # one that has no memory, as in torch.func
            return
        index = bisect.bisect_right(self._begins, address) - 1
        if index >= 0 and address < self._ranges[index][1]:
            self.read.setdefault(self._stack[-1], set()).add(self._ranges[index][2])
