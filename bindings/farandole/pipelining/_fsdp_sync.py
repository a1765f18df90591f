"""FSDP2 modules in a stage: gradients stay unsharded over the microbatches of a step and are reduced once, at its end."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed as dist
from torch import nn

from farandole import _C


class FsdpSync:
    """The reduction of one module that ``fully_shard`` was applied to, with all such modules in it.

    What torch's own pipelining does: no backward of a step reduces or reshards, and its end does both. Whether forwards
    reshard is as the user has set it.
    """

    def __init__(self, root: Any):
        self._root = root
        self._groups = {group for module in _fsdp_modules(root) for group in _process_groups(module)}
        self._is_manual = hasattr(root, "finalize_backward")  # torch before that is told when backwards end
        self._is_unfinished = False  # a step began and did not come to its end

    def require(self, required: bool) -> None:
        if required:
            return  # finish() does it
        if self._is_unfinished and hasattr(self._root, "reset_iter_state") and self._state._is_root:
            self._root.reset_iter_state()
        self._is_unfinished = True
        if self._is_manual:
            self._root.set_manual_backward_finalization(True)
        else:
            self._root.set_is_last_backward(False)
        self._root.set_requires_gradient_sync(False)
        self._root.set_reshard_after_backward(False)

    def finish(self, finalize: bool) -> None:
        """Called after the last backward of a step; without ``finalize`` a later step reduces its gradients, too."""
        self._is_unfinished = False
        if not finalize:
            return
        self._root.set_requires_gradient_sync(True)
        self._root.set_reshard_after_backward(True)
        if self._is_manual:
            self._root.finalize_backward()
            self._root.set_manual_backward_finalization(False)
            return
        self._root.set_is_last_backward(True)
        for state in reversed(self._state._state_ctx.all_states):
            for group in reversed(_param_groups(state)):
                group.post_backward()
        self._state._root_post_backward_final_callback()

    def abandon(self, reason: str) -> None:
        # As for torch's DistributedDataParallel: the error of the others is what the backend's abort says.
        for group in self._groups:
            _C.abandon_group(group, f"global rank {dist.get_rank()} abandoned the group: {reason}")

    def keeps_parameters(self) -> bool:
        """Whether forwards leave parameters unsharded: else W would need what a later forward has let go."""
        return all(
            (module is self._root and getattr(module._get_fsdp_state(), "_auto_reshard_after_forward", False))
            or all(group.post_forward_mesh_info is None for group in _param_groups(module._get_fsdp_state()))
            for module in _fsdp_modules(self._root)
        )

    @property
    def _state(self) -> Any:
        return self._root._get_fsdp_state()


def fsdp_roots(module: nn.Module) -> list[Any]:
    """The FSDP2 modules that are in no other one."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # whoever uses it has imported it
    if fsdp is None:
        return []
    if isinstance(module, fsdp.FSDPModule):
        return [module]
    return [root for child in module.children() for root in fsdp_roots(child)]


def _fsdp_modules(root: nn.Module) -> list[Any]:
    fsdp: Any = sys.modules["torch.distributed.fsdp"]
    return [module for module in root.modules() if isinstance(module, fsdp.FSDPModule)]


def _process_groups(module: Any) -> list[dist.ProcessGroup]:
    groups = _param_groups(module._get_fsdp_state())
    return [process_group for group in groups for process_group in group.mesh_info.mesh.get_all_groups()]


def _param_groups(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
