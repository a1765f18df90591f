"""How a distributed optimizer stands for the one that it was made of."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch

from farandole.ddp._grads_elsewhere import look_for_blind_calls
from farandole.ddp._optimizer_state import BY_PARAMETER
from farandole.ddp._own_steps import hold


class StandsFor:
    """The part of the optimizer that shows the other's state, and is no copy of it."""

    _inner: torch.optim.Optimizer
    zero_grad: Callable[..., None]

    def _begin_its_steps(self) -> None:
        """Has the other's ``zero_grad()`` be this one's: itself it would find no ``.grad``, and leave ``main_grad``. Its
        ``step()`` is for this one alone."""
        mine, its = weakref.ref(self), weakref.ref(self._inner)

        def zero_grad(set_to_none: bool = True) -> None:
            outer, inner = mine(), its()
            if outer is not None:
                outer.zero_grad(set_to_none)
            elif inner is not None:
                type(inner).zero_grad(inner, set_to_none)

        vars(self._inner)["zero_grad"] = zero_grad
        hold(self._inner, self)
        look_for_blind_calls()

    @property
    def state(self) -> Any:
        """That of the optimizer that it was made of."""
        if sys._getframe(1).f_globals.get("__name__") == BY_PARAMETER:
            raise NotImplementedError(
                f"{BY_PARAMETER}: expected an optimizer of the model's own parameters, a DistributedOptimizer has "
                "parts of them: pass it itself to torch.distributed.checkpoint's save() and load(), "
                '{"optimizer": optimizer}, or call its state_dict() or full_state_dict(), which have the names already'
            )
        return self._inner.state

    @state.setter
    def state(self, state: Any) -> None:
        if hasattr(self, "_settings"):  # else torch's constructor, which makes an empty one
            self._inner.state = state

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refused: its runs are parts of the wrapper's buffers."""
        raise NotImplementedError(
            "a DistributedOptimizer cannot be copied or pickled: make another one over a copy of the model, and give it "
            "state_dict() or full_state_dict()"
        )
