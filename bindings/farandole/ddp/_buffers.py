"""The buffers that all ranks have of one."""

from __future__ import annotations

from collections.abc import Collection

import torch

from farandole.ddp._ignored import named_buffers
from farandole.ddp._members import Members


class Buffers:
    """Those of a module that are not ignored, as they are now. Modules are walked again only where they have changed: a
    walk takes 2 us of a forward for each of them."""

    def __init__(self, module: torch.nn.Module, ignored: Collection[str]) -> None:
        self._module = module
        self._ignored = ignored
        self._members: Members | None = None
        self._buffers: list[torch.Tensor] = []

    def now(self) -> list[torch.Tensor]:
        if torch.compiler.is_compiling():
            return self._walk()
        if self._members is None or not self._members.are_all or self._members.have_changed():
            self._members = Members(self._module, "_buffers")
            self._buffers = self._walk()
        return self._buffers

    def _walk(self) -> list[torch.Tensor]:
        return [buffer for _, buffer in named_buffers(self._module, self._ignored)]
