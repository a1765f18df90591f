"""The part of the wrapper that says when the parameters come that other ranks have updated."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from farandole import _C
from farandole.ddp._ignored import named_parameters
from farandole.ddp._param_sync import ParamSync


class SyncsParameters(torch.nn.Module):
    """By Megatron-core's names."""

    _param_sync: ParamSync | None

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        """Torch's, once all have come that an optimizer has updated on other ranks: who asks reads or writes them."""
        if isinstance(self._param_sync, ParamSync):  # nothing of that where another wrapper has them now
            self._param_sync.finish_unless_abandoned()
        return super().named_parameters(*args, **kwargs)

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Brings the parameters that the optimizer has updated on other ranks: see ParamSync.start."""
        if self._param_sync is None:
            raise RuntimeError("start_param_sync(): nothing is sharded: expected use_distributed_optimizer=True")
        self._param_sync.start(force_sync=force_sync, force_dispatch=force_dispatch)

    @torch.no_grad()
    def broadcast_params(self: Any) -> None:
        """Gives every replica the parameters of rank 0, once all have come. A collective. An optimizer's float32 copies
        stay as they are (``reload_model_params``)."""
        if self._param_sync is not None:
            self._param_sync.finish()
        named = [*named_parameters(self.module, self.parameters_to_ignore)]
        for replicas, is_dense in ((self.replicas, True), (self.experts, False)):
            tensors = [parameter for _, parameter in named if getattr(parameter, "allreduce", True) == is_dense]
            for group in filter(None, (replicas.instances, replicas.group)):
                _C.broadcast_tensors(group, tensors, 0)

    def enable_forward_pre_hook(self) -> None:
        """Forwards wait for the parameters that they need, as after construction with overlap_param_gather."""
        self._overlapped_param_sync().enable()

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Forwards do not wait any more. Waits for all parameters now, unless ``param_sync`` is False."""
        self._overlapped_param_sync().disable(param_sync)

    def _overlapped_param_sync(self) -> ParamSync:
        if self._param_sync is None or not self._param_sync.overlaps:
            raise RuntimeError("forward pre-hooks: expected overlap_param_gather=True")
        return self._param_sync
