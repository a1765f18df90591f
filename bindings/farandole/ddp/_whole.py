"""Whole parameters for optimizers that need them: who updates which, and the way of its parts there and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from farandole import _C


def owners_of(shares: list[dict[int, int]], size: int) -> list[int]:
    """Which rank updates each parameter, from how many elements of it which ranks have.

    What lies on one rank stays there. Of the ranks that share another one, largest first, it is that which has the
    least to update so far (of equals, that which has most of it), unless some rank has less by as much as this one.
    """
    owners = [next(iter(share)) if len(share) == 1 else -1 for share in shares]
    load = [0] * size
    for share, owner in zip(shares, owners, strict=True):
        if owner >= 0:
            load[owner] += share[owner]
    for index in sorted(range(len(shares)), key=lambda index: -sum(shares[index].values())):
        share = shares[index]
        if owners[index] < 0:
            sharer = min(share, key=lambda rank: (load[rank], -share[rank], rank))
            idlest = load.index(min(load))
            numel = sum(share.values())
            owners[index] = idlest if load[sharer] - load[idlest] >= numel else sharer
            load[owners[index]] += numel
    return owners


@dataclass(frozen=True)
class _Part:
    """Elements [begin, end) of a bucket, of one parameter, in one rank's part of the bucket."""

    bucket: int
    begin: int
    end: int
    holder: int
    owner: int


class WholeParameters:
    """Parameters that one rank of a group updates each, over buckets of which each rank has a part.

    An owner works in its own memory of the bucket: others send it their parts of the gradient before a step, and get
    their parts of the parameter after it, by one all-to-all each, in bytes whatever the types are. Only what lies on
    several ranks moves. Every rank of the group reckons the same, from the layout alone.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._buckets: list[_C.GradientBucket] = []
        self._slots: list[tuple[int, int, int, int]] = []  # bucket, parameter, offset, elements
        self._away: list[list[_Part]] = []  # by rank: what it owns and this rank has
        self._here: list[list[_Part]] = []  # by rank: what this rank owns and it has
        self._is_idle = True  # no parameter lies on several ranks

    def add(self, bucket: _C.GradientBucket, is_wanted: Callable[[int], bool]) -> None:
        """Its parameters that are wanted, by index."""
        number = len(self._buckets)
        self._buckets.append(bucket)
        self._slots += [
            (number, *slot) for slot in sorted(bucket.slots, key=lambda slot: slot[1]) if is_wanted(slot[0])
        ]

    def settle(self) -> list[list[int]]:
        """Once all are added: the parameters that this rank updates, by bucket."""
        size, me = self._group.size(), self._group.rank()
        shares = [self._share(*slot) for slot in self._slots]
        owners = owners_of(
            [{rank: end - begin for rank, (begin, end) in share.items()} or {0: 0} for share in shares], size
        )
        self._away = [[] for _ in range(size)]
        self._here = [[] for _ in range(size)]
        mine: list[list[int]] = [[] for _ in self._buckets]
        for (bucket, parameter, _, numel), share, owner in zip(self._slots, shares, owners, strict=True):
            if owner == me and numel > 0:
                mine[bucket].append(parameter)
            for holder, (begin, end) in share.items():
                if holder == owner:
                    continue
                self._is_idle = False
                part = _Part(bucket, begin, end, holder, owner)
                if holder == me:
                    self._away[owner].append(part)
                elif owner == me:
                    self._here[holder].append(part)
        return mine

    def gather_grads(self) -> None:
        """Reduced gradients come to the owners. A collective."""
        self._move([bucket.grads for bucket in self._buckets], self._away, self._here)

    def scatter_parameters(self) -> None:
        """What owners have made of parameters comes to the ranks that have parts of them. A collective."""
        parameters = [bucket.parameters for bucket in self._buckets if bucket.parameters is not None]
        self._move(parameters, self._here, self._away)

    def _share(self, bucket: int, parameter: int, offset: int, numel: int) -> dict[int, tuple[int, int]]:
        """By rank that has some: its elements, as a range of the bucket."""
        part = self._buckets[bucket].grads.numel() // self._group.size()
        ranks = range(offset // part, (offset + numel - 1) // part + 1) if numel > 0 else ()
        return {rank: (max(offset, rank * part), min(offset + numel, (rank + 1) * part)) for rank in ranks}

    def _move(self, buckets: list[torch.Tensor], leaving: list[list[_Part]], coming: list[list[_Part]]) -> None:
        if self._is_idle:
            return
        sent, received = (
            [[_bytes_of(buckets, p) for p in of_rank] for of_rank in ranks] for ranks in (leaving, coming)
        )
        sent_sizes, received_sizes = ([sum(map(torch.numel, of_rank)) for of_rank in all_] for all_ in (sent, received))
        empty = torch.empty(0, dtype=torch.uint8, device=buckets[0].device)
        outgoing = torch.cat([empty, *(data for of_rank in sent for data in of_rank)])
        incoming = empty.new_empty(sum(received_sizes))
        dist.all_to_all_single(incoming, outgoing, received_sizes, sent_sizes, group=self._group)
        places = [data for of_rank in received for data in of_rank]
        for place, data in zip(places, incoming.split([place.numel() for place in places]), strict=True):
            place.copy_(data)


def _bytes_of(buckets: list[torch.Tensor], part: _Part) -> torch.Tensor:
    return buckets[part.bucket][part.begin : part.end].view(torch.uint8)
