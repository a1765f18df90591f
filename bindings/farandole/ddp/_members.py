"""What modules hold, to be compared with what they hold later."""

from __future__ import annotations

import itertools
import operator

import torch

_END = object()


class Members:
    """The objects in some dicts of a module and of those inside it, and these modules.

    Args:
        kinds: names of the dicts.
    """

    def __init__(self, module: torch.nn.Module, *kinds: str) -> None:
        everyone = list(module.modules())
        # Scripted modules have no dicts of their own.
        modules = [one for one in everyone if not isinstance(one, torch.jit.ScriptModule)]
        self.are_all = len(modules) == len(everyone)
        dicts = [getattr(one, kind) for one in modules for kind in (*kinds, "_modules")]
        self._views = [*(members.values() for members in dicts), (_END,)]  # which show what is in them later, too
        self._members = list(itertools.chain.from_iterable(self._views))

    def have_changed(self) -> bool:
        return not all(map(operator.is_, itertools.chain.from_iterable(self._views), self._members))
