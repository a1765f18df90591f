"""How a pipeline tells data parallelism which backward of a step is the last, and that there will be none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from farandole import _C
from farandole.pipelining._fsdp_sync import FsdpSync, fsdp_roots

_SWITCH = "require_backward_grad_sync"


@dataclass(frozen=True)
class _Wrapper:
    require: Callable[[bool], None]
    abandon: Callable[[str], None]
    finish: Callable[[bool], None] | None = None
    may_split: Callable[[], bool] = lambda: True  # with finish: whether I and W may be apart
    module: nn.Module | None = None  # whose require_backward_grad_sync is switched
    settle: Callable[[], None] | None = None  # reduces what no backward of the step has


class GradSync:
    """The gradient reductions of all data-parallel wrappers in a module.

    A wrapper is farandole's (any module with ``_set_require_sync(bool)``, ``_abandon_step(str)`` and ``_settle_step()``)
    or torch's, FSDP2 modules included.
    """

    def __init__(self, wrappers: list[_Wrapper]):
        self._wrappers = wrappers
        self.finalizes = True
        """Whether the step that runs reduces gradients; else they add up, as in no_sync(), for a later step's."""

    @classmethod
    def of(cls, submodule: nn.Module) -> GradSync | None:
        """None when the module has no wrapper."""
        wrappers: list[_Wrapper] = []
        for module in submodule.modules():
            if callable(getattr(module, "_set_require_sync", None)):
                wrappers.append(
                    _Wrapper(module._set_require_sync, module._abandon_step, module=module, settle=module._settle_step)
                )
            elif isinstance(module, DistributedDataParallel):
                wrappers.append(_Wrapper(_torch_switch(module), _torch_abandon(module), module=module))
        for sync in map(FsdpSync, fsdp_roots(submodule)):
            wrappers.append(_Wrapper(sync.require, sync.abandon, sync.finish, sync.keeps_parameters))
        return cls(wrappers) if wrappers else None

    @property
    def must_finish(self) -> bool:
        return any(wrapper.finish is not None for wrapper in self._wrappers)

    @property
    def is_never_split(self) -> bool:
        """Whether the stage's backwards may not be taken apart, whatever they are made of; it may change between steps."""
        return self.must_finish and not all(wrapper.finish and wrapper.may_split() for wrapper in self._wrappers)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Around a step: however it ends, other forwards of the wrappers are averaged after it if they were before."""
        switched = [wrapper.module for wrapper in self._wrappers if hasattr(wrapper.module, _SWITCH)]
        before = [getattr(module, _SWITCH) for module in switched]
        try:
            yield
        finally:
            for module, value in zip(switched, before, strict=True):
                setattr(module, _SWITCH, value)

    def require(self, required: bool) -> None:
        """Called with False before the first forward of a step and with True before its last backward."""
        for wrapper in self._wrappers:
            if self.finalizes or not required or wrapper.finish is not None:
                wrapper.require(required)

    def finish(self) -> None:
        """Called after the last backward of a step, where a wrapper must finish."""
        for wrapper in self._wrappers:
            if wrapper.finish is not None:
                wrapper.finish(self.finalizes)

    def settle(self) -> None:
        """Called after a step that trains: what no backward of it has reduced, for none came there, is reduced."""
        for wrapper in self._wrappers:
            if self.finalizes and wrapper.settle is not None:
                wrapper.settle()

    def abandon(self, reason: str) -> None:
        """Called when this rank will not finish its step: replicas must not wait for it."""
        for wrapper in self._wrappers:
            wrapper.abandon(reason)


def _torch_switch(module: DistributedDataParallel) -> Callable[[bool], None]:
    # These need to see the output of the last backward's own forward, which is long past by then.
    for option in ("find_unused_parameters", "static_graph"):
        if getattr(module, option, False):
            raise NotImplementedError(
                f"submodule holds a torch DistributedDataParallel with {option}=True, expected False: "
                "a pipeline's last backward does not follow its forward"
            )
    if getattr(module, "_use_python_reducer", False) or getattr(module, "_delay_all_reduce_all_params", False):
        raise NotImplementedError("submodule holds a torch DistributedDataParallel without its C++ reducer")

    def switch(required: bool) -> None:
        module.require_backward_grad_sync = required
        if required:
            # What DDP's own forward does when the backward after it reduces.
            module.require_forward_param_sync = True
            module.reducer.prepare_for_backward([])

    return switch


def _torch_abandon(module: DistributedDataParallel) -> Callable[[str], None]:
    def abandon(reason: str) -> None:
        # Torch's wrapper does not look for the reason: its error is what the backend's abort says.
        _C.abandon_group(module.process_group, f"global rank {dist.get_rank()} abandoned the group: {reason}")

    return abandon
