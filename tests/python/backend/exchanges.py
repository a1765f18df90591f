"""Random exchanges between ranks, that every rank can make for itself from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Transfer:
    """One message of an exchange; ``ident`` is its content."""

    source: int
    target: int
    tag: int
    numel: int
    ident: int


def random_exchange(seed: int, world_size: int, most: int = 12, large: int = 0) -> list[Transfer]:
    """Up to ``most`` messages between random ranks; about ``large`` percent of them large enough for rendezvous."""
    rng = random.Random(seed)
    transfers = []
    for index in range(rng.randrange(1, most + 1)):
        numel = 60_000 if rng.randrange(100) < large else rng.choice([0, 1, 2, 17, 300])
        source, target = rng.randrange(world_size), rng.randrange(world_size)
        transfers.append(Transfer(source, target, rng.randrange(3), numel, seed * 100 + index))
    return transfers


def halves_of(rank: int, transfers: list[Transfer], order_seed: int) -> list[tuple[bool, Transfer]]:
    """What ``rank`` sends (True) and receives, in a random order that keeps messages of equal
    (direction, peer, tag) in theirs, as c10d demands."""
    rng = random.Random(order_seed)
    halves = [(True, t) for t in transfers if t.source == rank] + [(False, t) for t in transfers if t.target == rank]

    def key(half: tuple[bool, Transfer]) -> tuple[bool, int, int]:
        is_send, t = half
        return is_send, t.target if is_send else t.source, t.tag

    queues: dict[tuple[bool, int, int], list[tuple[bool, Transfer]]] = {}
    for half in halves:
        queues.setdefault(key(half), []).append(half)
    rng.shuffle(halves)
    return [queues[key(half)].pop(0) for half in halves]
