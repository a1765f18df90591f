"""How a pipeline tells data parallelism which backward of a step is the last."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def grad_sync_switch(submodule: nn.Module) -> Callable[[bool], None] | None:
    """What turns gradient reduction of all data-parallel wrappers in a module off and on.

    A wrapper is farandole's (any module with ``_set_require_sync(bool)``) or torch's. None when
    there is none. The switch is called with False before the first forward of a step and with True
    before its last backward.
    """
    switches: list[Callable[[bool], None]] = []
    for module in submodule.modules():
        switch = getattr(module, "_set_require_sync", None)
        if callable(switch):
            switches.append(switch)
        elif isinstance(module, DistributedDataParallel):
            switches.append(_torch_switch(module))
    if not switches:
        return None
    if len(switches) == 1:
        return switches[0]

    def switch_all(required: bool) -> None:
        for switch in switches:
            switch(required)

    return switch_all


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
