"""An overflow that torch's GradScaler finds on one rank is one of all ranks: all step, or none, and scales stay equal."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

# Scalers go through gradients by type, in the order in which types first come. This one they cannot unscale, so that no
# other gradient has it.
_TYPE_OF_ITS_OWN = torch.complex64
_REFUSED = 2.0


class _FlagGrad(torch.Tensor):
    """Knows when a scaler comes to it, as the gradients of torch's DTensor do."""

    unscale: Callable[[torch.Tensor, torch.Tensor], None]
    _unscale_rest: Callable[[], Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            (flag,), found_inf, inv_scale = args
            return flag.unscale(found_inf, inv_scale)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class OverflowFlag(torch.nn.Parameter):
    """A parameter without elements, the last of an optimizer, whose gradient tells the ranks what the others have found.

    ``GradScaler.unscale_`` has by then looked at all gradients of this rank that it could see, and keeps what it has
    found in ``found_inf``, which its ``step`` and ``update`` go by.

    Args:
        device: of the gradients.
        groups: of all ranks that step together, a collective of each in this order: what one of them learns the next
            is told.
        unscale_rest: a method that does for gradients that scalers do not see what they do for others; may raise. It is
            held weakly: Python's collector does not look through a tensor's ``grad``.
    """

    grad: torch.Tensor | None

    def __new__(
        cls,
        device: torch.device,
        groups: Iterable[dist.ProcessGroup | None],
        unscale_rest: Callable[[torch.Tensor, torch.Tensor], None],
    ) -> OverflowFlag:
        flag = super().__new__(cls, torch.empty(0, dtype=_TYPE_OF_ITS_OWN, device=device))
        flag._groups = [group for group in dict.fromkeys(groups) if group is not None and group.size() > 1]
        flag._unscale_rest = weakref.WeakMethod(unscale_rest)
        flag.raise_again()
        return flag

    def raise_again(self) -> None:
        """Its gradient is there again, whoever may have taken it away."""
        if not isinstance(self.grad, _FlagGrad):
            grad = self.detach().clone().as_subclass(_FlagGrad)
            unscale = weakref.WeakMethod(self._unscale)
            grad.unscale = lambda found_inf, inv_scale: unscale()(found_inf, inv_scale)  # type: ignore[misc]
            rest = self._unscale_rest
            grad._unscale_rest = lambda: rest()  # unlike this, a function can be copied
            self.grad = grad

    def _unscale(self, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        refusal: Exception | None = None
        try:
            self._unscale_rest()(found_inf, inv_scale)
        except Exception as error:
            refusal = error
            found_inf.fill_(_REFUSED)
        for group in self._groups:
            dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)
        if refusal is not None:
            raise refusal
        if found_inf.item() >= _REFUSED:
            raise RuntimeError("GradScaler.unscale_() was refused on another rank, whose error has the reason")


def owner_of(tensor: torch.Tensor) -> tuple[bool, Any]:
    """Whether it is a flag or the gradient of one, and of which optimizer, None where that is gone."""
    if not isinstance(tensor, (OverflowFlag, _FlagGrad)):
        return False, None
    unscale_rest = tensor._unscale_rest()
    return True, None if unscale_rest is None else unscale_rest.__self__
