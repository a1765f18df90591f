"""What stages hand over beside tensors: pickled without them, the tensors being sent as they are."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from farandole.pipelining._sendable import as_sent


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO):
        super().__init__(file, protocol=4)
        self.tensors: list[torch.Tensor] = []
        self._places: dict[int, int] = {}

    def persistent_id(self, item: Any) -> int | None:
        if not isinstance(item, torch.Tensor):
            return None
        place = self._places.setdefault(id(item), len(self.tensors))
        if place == len(self.tensors):
            sent = as_sent(item)
            if not isinstance(sent, torch.Tensor):
                raise TypeError(
                    f"a {type(item).__name__} is inside another object, expected it in tuples, lists or dicts"
                )
            self.tensors.append(sent)
        return place


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, tensors: list[torch.Tensor]):
        super().__init__(file)
        self._tensors = tensors

    def persistent_load(self, place: int) -> torch.Tensor:
        return self._tensors[place]


def pack(result: Any) -> tuple[list[torch.Tensor], bytes]:
    """The tensors in what a module returned, wherever they are in it, and the rest.

    Raises:
        TypeError: it cannot be pickled, or there is no tensor in it.
    """
    file = io.BytesIO()
    packer = _Packer(file)
    try:
        packer.dump(result)
    except Exception as error:
        raise TypeError(
            f"the module returned a {type(result).__name__}, expected tensors and what can be pickled: {error}"
        ) from error
    if not packer.tensors:
        raise TypeError(
            f"the module returned a {type(result).__name__} without a tensor, expected at least one for the next stage"
        )
    return packer.tensors, file.getvalue()


def unpack(data: bytes, tensors: list[torch.Tensor]) -> Any:
    """What :func:`pack` was given, with these tensors. Zeros after the data do not matter."""
    return _Unpacker(io.BytesIO(data), tensors).load()


def detached(result: Any) -> Any:
    """The same structure with tensors that have no graph."""
    return tree_map_only(torch.Tensor, torch.Tensor.detach, result)
