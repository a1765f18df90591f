"""What a module that runs ahead was called with, and whether that was written to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from farandole._C import are_contents, write_counts
from farandole.sparse._batch_paths import Path, Step, tensors_in
from farandole.sparse._input_equality import copy_of_part, is_written, version_of
from farandole.sparse._input_writes import InputWrites


class GivenCall:
    is_written = False  # by the module

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.call = args, kwargs
        self._parts = self.call if kwargs else args
        self._noted: list[tuple[Path, Step | None, torch.Tensor, int, torch.Tensor | None]] = []  # with copies of parts
        self._tensors: list[torch.Tensor | None] = []
        self._counts: tuple[int | None, ...] = ()
        self._contents: list[tuple[Any, list[Any] | None, list[Any]]] | None = None
        self._values: InputWrites | None = None

    def note(self, by_value: bool = False) -> None:
        if not self._is_untouched():
            holders: list[Any] = []
            self._noted = [
                (*place, version_of(tensor), copy_of_part(tensor))
                for place in tensors_in(self._parts, holders)
                for tensor in place[2:]
            ]
            self._tensors = self._as_noted()
            self._counts = write_counts(self._tensors)
            contents = [*map(_contents_of, holders)]
            self._contents = None if None in contents else contents  # type: ignore[assignment]
        self._values = InputWrites(self._as_noted(), by_value) if by_value else None

    def is_as_noted(self) -> bool:
        """Tensors that have come since are of those that features make when they are asked for."""
        is_written = not (self._is_untouched() or self._are_noted(tensors_in(self._parts)))
        return not is_written and (self._values is None or not self._values.found_any())

    def tensors(self) -> list[torch.Tensor]:
        """All that ``is_as_noted()`` reads, and what it was called with."""
        copies = [copied for *_, copied in self._noted] + ([] if self._values is None else self._values.copies)
        return [*self._as_noted(), *(copied for copied in copies if copied is not None)]

    # By identity, without a walk through all of it. False where that cannot be said.
    def _is_untouched(self) -> bool:
        return (
            self._contents is not None and write_counts(self._tensors) == self._counts and are_contents(self._contents)
        )

    def _are_noted(self, found: list[tuple[Path, Step | None, torch.Tensor]]) -> bool:
        now = {(path, step): tensor for path, step, tensor in found}
        return all(
            now.get((path, step)) is tensor and not is_written(tensor, version, copied)
            for path, step, tensor, version, copied in self._noted
        )

    def _as_noted(self) -> list[torch.Tensor]:
        return [tensor for _, _, tensor, *_ in self._noted]


def _contents_of(holder: Any) -> tuple[Any, list[Any] | None, list[Any]] | None:
    """None where it has its parts in another way."""
    if isinstance(holder, list):
        return holder, None, [*holder]
    if isinstance(holder, Mapping) and not isinstance(holder, dict):
        return None
    held = holder if isinstance(holder, dict) else getattr(holder, "__dict__", None)
    return None if held is None else (held, [*held], [*held.values()])
