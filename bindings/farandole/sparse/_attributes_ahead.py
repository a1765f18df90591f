"""Attributes of a model, buffers say, that inputs of sharded modules are computed with ahead of its forward."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from farandole._C import write_counts
from farandole.sparse._input_equality import has_same_values


class AttributesAhead:
    """
    Args:
        model: whose attributes they are.
        names: of these.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self._model = model
        self.names = tuple(names)
        self._getters = [operator.attrgetter(name) for name in self.names]
        self.broadcast: set[str] = set()  # by DDP, in each forward, mostly with what they hold already

    def note_wrappers(self, model: nn.Module) -> None:
        """Of the model in its wrappers."""
        if not self.names:
            return
        wrappers = [module for module in model.modules() if getattr(module, "broadcast_buffers", False)]
        buffers = {id(buffer) for wrapper in wrappers for buffer in wrapper.buffers()}
        self.broadcast |= {name for name, value in zip(self.names, self.now(), strict=True) if id(value) in buffers}

    def read(self) -> ReadAttributes | None:
        """As they are now; None where there are none."""
        return ReadAttributes(self) if self.names else None

    def now(self) -> list[Any]:
        return [get(self._model) for get in self._getters]


class ReadAttributes:
    """What the inputs of one batch were computed with."""

    def __init__(self, attributes: AttributesAhead) -> None:
        self._attributes = attributes
        self._values = attributes.now()
        self._counts = _counts(self._values)
        self.copies: dict[str, torch.Tensor] = {
            name: value.detach().clone()
            for name, value in zip(attributes.names, self._values, strict=True)
            if name in attributes.broadcast
        }
        self._unseen = self.copies  # by overwritten()

    def changed(self) -> list[str]:
        """Those that are others by now, or were written to; where DDP may have, with other values."""
        now = self._attributes.now()
        counts = _counts(now)
        if counts == self._counts and all(map(operator.is_, now, self._values)):
            return []
        found = []
        for name, value, before, count, count_before in zip(
            self._attributes.names, now, self._values, counts, self._counts, strict=True
        ):
            is_written = value is not before or count != count_before
            if is_written and not (name in self.copies and has_same_values(self.copies[name], value)):
                found.append(name)
        return found

    def overwritten(self, waits_for_device: bool) -> list[str]:
        """Those that DDP has given other values since, by writes that torch does not count; asked once. On a device, for
        which that waits, only if it may."""
        copies, self._unseen = self._unseen, {}
        if not copies:
            return []
        now = self._attributes.now()
        found = []
        for name, value, count, count_before in zip(
            self._attributes.names, now, _counts(now), self._counts, strict=True
        ):
            is_uncounted = count == count_before and name in copies and (waits_for_device or value.is_cpu)
            if is_uncounted and not has_same_values(copies[name], value):
                found.append(name)
        return found


def _counts(values: list[Any]) -> tuple[int | None, ...]:
    counts: tuple[int | None, ...] = write_counts(
        [value if isinstance(value, torch.Tensor) else None for value in values]
    )
    return counts
