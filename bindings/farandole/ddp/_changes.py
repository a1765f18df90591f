"""Whether a module still has the parameters that it had when it was wrapped."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch

from farandole.ddp._fused import ADDED
from farandole.ddp._ignored import named_parameters
from farandole.ddp._members import Members

_FIRST_ROUNDS = 3


class ParameterWatch:
    """Finds parameters that require a gradient and are none of those that were wrapped: nobody averages them.

    They were frozen then, or have come since: by ``load_state_dict(assign=True)``, in another's place, in a new module.
    The plain tensors that ``torch.func.functional_call`` puts there are the caller's: computed from wrapped ones, or
    others.
    What the wrapped ones themselves have become the reducer sees. Nor may kernels add to ``main_grad`` unless that
    was known when the module was wrapped (``knows_added``), which is looked at in the first rounds.
    """

    def __init__(
        self, module: torch.nn.Module, wrapped: Iterable[torch.Tensor], ignored: Collection[str], knows_added: bool
    ) -> None:
        self._module = module
        self._ignored = ignored
        self._wrapped = set(wrapped)
        self._rounds_to_look = 0 if knows_added else _FIRST_ROUNDS
        self._round = -1
        self._change = ""
        places = ((one._parameters, *item) for one in module.modules() for item in one._parameters.items())
        self._place = next((place for place in places if place[2] in self._wrapped), None)
        self._look()

    def change(self, round_: int) -> str:
        """For the reducer, once for each of its rounds; empty where there is none."""
        if round_ != self._round:
            self._round = round_
            if self._change or self._has_changed():
                self._change = self._describe()
                self._look()
            if self._rounds_to_look > 0 and not self._change:
                self._rounds_to_look -= 1
                self._change = self._describe_added()
        return self._change

    def has_own(self) -> bool:
        """Whether the module has the wrapped parameters in it now, by the first one; else ``functional_call`` has put others
        in their place."""
        return self._place is None or self._place[0].get(self._place[1]) is self._place[2]

    def _look(self) -> None:
        self._members = Members(self._module, "_parameters")
        self._frozen = [parameter for parameter in self._module.parameters() if not parameter.requires_grad]

    def _has_changed(self) -> bool:
        return self._members.have_changed() or any(one.requires_grad for one in self._frozen)

    def _describe_added(self) -> str:
        for name, parameter in self._module.named_parameters():
            if getattr(parameter, ADDED, False):
                return (
                    f"parameter '{name}' has {ADDED}=True: a kernel has added its gradient to main_grad, and autograd "
                    f"once more. Expected {ADDED}=False when the module is wrapped, and grad_reduce_in_fp32=True or "
                    "use_distributed_optimizer=True"
                )
        return ""

    def _describe(self) -> str:
        new = [
            name
            for name, parameter in named_parameters(self._module, self._ignored)
            if parameter.requires_grad and parameter not in self._wrapped and isinstance(parameter, torch.nn.Parameter)
        ]
        if not new:
            return ""
        others = f" (nor are {len(new) - 1} others)" if len(new) > 1 else ""
        return (
            f"parameter '{new[0]}' requires a gradient, and is not one of those that were wrapped{others}: frozen then, "
            "or put there since, as load_state_dict(assign=True) does. Expected the module to be wrapped again after that"
        )
