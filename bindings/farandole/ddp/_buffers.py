"""The buffers that all ranks have of one."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
import torch.distributed as dist

from farandole import _C
from farandole.ddp._ignored import named_buffers
from farandole.ddp._lone_calls import told_when_long
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


def broadcast(groups: Sequence[dist.ProcessGroup], buffers: list[torch.Tensor], source: int) -> None:
    """A collective of each of these groups."""
    for group in groups:
        _C.broadcast_tensors(group, buffers, source)


def broadcast_for_evaluation(groups: Sequence[dist.ProcessGroup], buffers: list[torch.Tensor], source: int) -> None:
    """So, where the forward has no gradients: one rank may be alone with it."""
    if not buffers or all(group.size() == 1 for group in groups):
        return
    with told_when_long(
        f"a forward of the wrapper without gradients gives the buffers of rank {source} of the group to all, so that all "
        "ranks have to call it: what one rank alone evaluates it calls by model.module"
    ):
        broadcast(groups, buffers, source)
