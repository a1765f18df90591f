"""Several all-to-alls as one: on CPU a call costs more than a copy of what it moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from farandole.sparse._exchange_group import ExchangeGroup

Splits = Sequence[Sequence[int]]  # by tensor and rank, in elements

_MOST_PIECES = 128  # of memory, that are gathered and given out again


def can_pack(tensors: Sequence[torch.Tensor], world_size: int) -> bool:
    """Whether these would go round in one exchange: flat ones on CPU, and not too many pieces."""
    return len(tensors) * world_size <= _MOST_PIECES and all(
        tensor.device.type == "cpu" and tensor.dim() == 1 and tensor.is_contiguous() for tensor in tensors
    )


class PackedExchange:
    """Starts the all-to-all of all these tensors. For each rank the bytes of all of them lie one after the other."""

    def __init__(self, group: ExchangeGroup, tensors: Sequence[torch.Tensor], sent: Splits, received: Splits) -> None:
        self._group = group
        self._types = [tensor.dtype for tensor in tensors]
        sizes = [tensor.element_size() for tensor in tensors]
        pieces = [
            tensor.view(torch.uint8).split([size * count for count in counts])
            for tensor, size, counts in zip(tensors, sizes, sent, strict=True)
        ]
        buffer = torch.cat([of_tensor[rank] for rank in range(group.size) for of_tensor in pieces])
        self._sizes = [
            size * counts[rank] for rank in range(group.size) for size, counts in zip(sizes, received, strict=True)
        ]
        count = len(tensors)
        to = [sum(of_tensor[rank].numel() for of_tensor in pieces) for rank in range(group.size)]
        by = [sum(self._sizes[rank * count : (rank + 1) * count]) for rank in range(group.size)]
        self._buffer = buffer.new_empty(sum(by))
        self._work: dist.Work | None = group.all_to_all(self._buffer, buffer, by, to)
        self._arrived: list[torch.Tensor] = []

    def wait(self) -> list[torch.Tensor]:
        """The tensors, as all-to-alls of their own would have made them."""
        if self._work is not None:
            self._group.wait(self._work)
            self._work = None
            pieces, count = self._buffer.split(self._sizes), len(self._types)
            self._arrived = [torch.cat(pieces[i::count]).view(dtype) for i, dtype in enumerate(self._types)]
        return self._arrived


class SingleExchanges:
    """An all-to-all for each of these tensors, for what ``can_pack`` refuses."""

    def __init__(self, group: ExchangeGroup, tensors: Sequence[torch.Tensor], sent: Splits, received: Splits) -> None:
        self._group = group
        self._works: list[dist.Work] = []
        self._arrived: list[torch.Tensor] = []
        for tensor, to, by in zip(tensors, sent, received, strict=True):
            self._arrived.append(tensor.new_empty(sum(by), *tensor.shape[1:]))
            self._works.append(group.all_to_all(self._arrived[-1], tensor, by, to))

    def wait(self) -> list[torch.Tensor]:
        while self._works:
            self._group.wait(self._works[-1])
            self._works.pop()
        return self._arrived
