"""Whether an iterator writes to batches after it gave them, while they are in flight."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from farandole.sparse._batch_paths import Path, Step, path_name, tensors_in
from farandole.sparse._input_equality import is_whole

# Loads that are looked at; then so many in a row of every so many, and all once one was found: it takes 40 us of a step.
_FIRST_LOOKS, _IN_A_ROW, _EVERY = 16, 4, 16
# Loads whose tensors are all sampled; then those that have memory of a batch before, in the second of each row.
_FIRST_SAMPLES, _SAMPLED = 4, _EVERY - _IN_A_ROW + 2
_SAMPLES = 4096


class GivenBatches:
    """Notes around each ``next`` of the iterator how often tensors of the batches in flight were written to.

    An error is one that was written to meanwhile, and whose memory the new batch has too, or which is all of its memory
    where nothing else runs meanwhile: torch counts writes to a part of a tensor for all of it, and an iterator may fill
    one part after the other. What torch does not count, writes to numpy's arrays, is found by samples of what lies in
    the same memory in two batches: constants may do so. Iterators do it from the first batches on or never, so these are
    looked at, and some later ones.
    """

    def __init__(self) -> None:
        self._given: dict[int, _Given] = {}
        self._errors: dict[int, RuntimeError] = {}
        self._loads = 0
        self._found_any = False
        self._looks = True

    def begin_source(self) -> None:
        self._loads, self._found_any = 0, False

    def before_next(self) -> None:
        self._looks = self._found_any or self._loads < _FIRST_LOOKS or self._loads % _EVERY >= _EVERY - _IN_A_ROW
        self._loads += 1
        if self._looks:
            for given in self._given.values():
                given.note()

    def after_next(self, number: int, batch: Any, is_alone: bool) -> None:
        """``batch`` as it goes on, None for none; ``is_alone``: none but the iterator may have written meanwhile."""
        if not self._looks:
            return
        new = _Given(batch)
        shared: set[int] = set()
        for other, given in self._given.items():
            both = given.pointers & new.pointers
            shared |= both
            where = given.refilled(new) or given.written(both, is_alone)
            if where is not None and other not in self._errors:
                self._found_any = True
                self._errors[other] = RuntimeError(
                    f"batch {other}: the iterator has written to {where} after it gave that, before the batch's step had "
                    "ended: expected memory of its own for each batch, since batches are loaded ahead"
                )
        if batch is None:
            return
        if self._loads <= _FIRST_SAMPLES:
            new.sample(new.pointers)
        elif shared and (self._found_any or self._loads % _EVERY == _SAMPLED):
            new.sample(shared)
        self._given[number] = new

    def taken(self, number: int) -> None:
        """Its forward is next, in which it may end at any time."""
        if number in self._given:
            self._given[number].let_go()

    def forget(self, number: int) -> RuntimeError | None:
        """What refuse() would have raised."""
        self._given.pop(number, None)
        return self._errors.pop(number, None)

    def is_overwritten(self, number: int) -> bool:
        return number in self._errors

    def refuse(self, number: int) -> None:
        """
        Raises:
            RuntimeError: the iterator has written to this batch.
        """
        if number in self._errors:
            raise self._errors[number]


class _Given:
    def __init__(self, batch: Any) -> None:
        found = tensors_in(batch)
        self._places = [(path, step) for path, step, _ in found]
        self._tensors: list[Any] = [tensor for _, _, tensor in found]  # weak references from let_go() on
        self._is_weak = False
        self._whole = _weak(batch)
        self._counts = self._at_first = list(map(_count_of, self._tensors))
        self._lie = list(map(_place_of, self._tensors))
        self.pointers = set(self._lie) - {0}
        self._samples: dict[int, torch.Tensor] = {}

    def note(self) -> None:
        self._counts = self._now()

    def let_go(self) -> None:
        self._tensors = list(map(weakref.ref, self._tensors))
        self._is_weak = True

    def sample(self, pointers: set[int]) -> None:
        for index, tensor in enumerate(self._tensors):
            if self._lie[index] in pointers and tensor.is_cpu:
                self._samples[index] = _sample(tensor)

    def refilled(self, new: _Given) -> str | None:
        """What is another tensor, where both are the same object, whose ``to`` returns itself."""
        whole = None if self._whole is None else self._whole()
        if whole is None or new._whole is None or new._whole() is not whole:
            return None
        now = dict(zip(new._places, new._tensors, strict=True))
        for place, tensor in zip(self._places, self._alive(), strict=True):
            if now.get(place) is not tensor:
                return _name(place)
        return None

    def written(self, pointers: set[int], is_alone: bool) -> str | None:
        """What the iterator has written to since ``note()``; ``pointers``: where the new batch lies too."""
        now = self._now()
        if now == self._counts and not (pointers and self._samples):
            return None
        for index, tensor in enumerate(self._alive()):
            if tensor is None:
                continue
            is_given_again = self._lie[index] in pointers
            if now[index] != self._counts[index]:
                is_written = is_given_again or (is_alone and is_whole(tensor))
            else:
                is_written = is_given_again and self._differs(index, tensor)
            if is_written:
                return _name(self._places[index])
        return None

    def _differs(self, index: int, tensor: torch.Tensor) -> bool:
        if index not in self._samples or torch.equal(self._samples[index], _sample(tensor)):
            return False
        return _count_of(tensor) == self._at_first[index]  # else a forward has, maybe meanwhile

    def _alive(self) -> list[torch.Tensor | None]:
        return [reference() for reference in self._tensors] if self._is_weak else self._tensors

    def _now(self) -> list[int]:
        if not self._is_weak:
            return list(map(_count_of, self._tensors))
        counts = zip(self._alive(), self._counts, strict=True)
        return [before if tensor is None else _count_of(tensor) for tensor, before in counts]


def _name(place: tuple[Path, Step | None]) -> str:
    path, step = place
    return path_name(path if step is None else (*path, step))


def _weak(batch: Any) -> weakref.ref[Any] | None:
    try:
        return weakref.ref(batch)
    except TypeError:  # containers, which are new for each batch
        return None


def _count_of(tensor: torch.Tensor) -> int:
    try:
        return tensor._version
    except RuntimeError:  # of inference
        return 0


def _place_of(tensor: torch.Tensor) -> int:
    """0 where there is none, or nothing in it."""
    if type(tensor) is not torch.Tensor or tensor.is_nested or tensor.is_quantized:
        return 0
    try:
        return tensor.data_ptr()
    except RuntimeError:  # of sparse ones
        return 0


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Its bytes, which are equal where values are none (nan)."""
    flat = tensor.detach().reshape(-1)
    return flat[:: max(1, len(flat) // _SAMPLES)].clone().view(torch.uint8)
