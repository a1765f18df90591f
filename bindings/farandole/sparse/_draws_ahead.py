"""Random numbers that are drawn ahead of a forward, in another order than the plain loop draws them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator

import torch

from farandole.sparse._contexts import NOTHING

_WARNING = (
    "{} draws from torch's global generator ahead of forward, before the forwards of batches in flight do: as random as "
    "in the plain loop, but with other numbers where these draw, too. Expected a torch.Generator of its own, or that "
    "module behind the sharded one"
)


class DrawsAhead:
    """Looks at the first run of what runs ahead, in each mode of the model.

    Args:
        device: whose generator is looked at beside that of the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._looked_at: set[bool] = set()  # modes
        self._found = ""

    def looked_for(self, names: Iterable[str], training: bool, strict: bool) -> contextlib.AbstractContextManager[None]:
        """Around a run of these modules.

        Raises:
            ValueError: they draw, and are to be strict.
        """
        if training in self._looked_at and not self._found:
            return NOTHING
        return self._looking(names, training, strict)

    @contextlib.contextmanager
    def _looking(self, names: Iterable[str], training: bool, strict: bool) -> Iterator[None]:
        is_first = training not in self._looked_at
        before = self._states() if is_first else []
        yield
        if is_first:
            self._looked_at.add(training)
            if not all(map(torch.equal, before, self._states())):
                self._found = _WARNING.format(", ".join(map(repr, names)))
                if not strict:
                    warnings.warn(self._found, stacklevel=2)
        if strict and self._found:
            raise ValueError(self._found)

    def _states(self) -> list[torch.Tensor]:
        states = [torch.default_generator.get_state()]
        if self._device.type == "cuda" and torch.cuda.is_initialized():
            states.append(torch.cuda.get_rng_state(self._device))
        return states
