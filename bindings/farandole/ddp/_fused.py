"""Kernels that add gradients to ``main_grad`` themselves, and say so in ``grad_added_to_main_grad``, as for Megatron-core."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from farandole.ddp._ignored import ignored_in, named_parameters

ADDED = "grad_added_to_main_grad"
# By which modules with such kernels are known: Megatron-core's and TransformerEngine's.
_FLAGS = ("gradient_accumulation_fusion", "fuse_wgrad_accumulation")


def is_added_of(module: torch.nn.Module, in_main_grad: bool, fuses: bool = False) -> Callable[[int], bool] | None:
    """Whether a kernel has added the gradient of a trainable parameter, by index; None where no kernel does.

    It is asked for each gradient, so only where a module has such kernels, a parameter the attribute, or ``fuses``.

    Raises:
        ValueError: a module has such kernels, but gradients are in ``.grad``.
    """
    named = named_parameters(module, ignored_in(module))
    parameters = [parameter for _, parameter in named if parameter.requires_grad]
    has_attribute = any(hasattr(parameter, ADDED) for parameter in parameters)
    reset_added(parameter for parameter in parameters if hasattr(parameter, ADDED))
    flagged = next(
        ((one, flag) for one in module.modules() for flag in _FLAGS if getattr(one, flag, False) is True), None
    )
    if not in_main_grad:
        if flagged is not None:
            one, flag = flagged
            name = next(name for name, other in module.named_modules() if other is one)
            raise ValueError(
                f"module{f' {name!r}' if name else ''} ({type(one).__name__}) has {flag}=True: its kernels add gradients "
                "to main_grad, which is .grad here, where autograd adds them again: expected grad_reduce_in_fp32=True "
                "or use_distributed_optimizer=True"
            )
        return None
    if not fuses and flagged is None and not has_attribute:
        return None
    reset_added(parameters)

    def is_added(index: int) -> bool:
        parameter = parameters[index]
        return getattr(parameter, ADDED) and not getattr(parameter, "zero_out_wgrad", False)

    return is_added


def reset_added(parameters: Iterable[torch.Tensor]) -> None:
    """Nothing is in main_grad yet. Kernels look for the attribute, too."""
    for parameter in parameters:
        setattr(parameter, ADDED, False)
