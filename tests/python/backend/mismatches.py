"""Random messages of which some are wanted as something else than they were sent as, drawn alike by all ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

# Without the complex ones, which torch.distributed sends as pairs of real numbers.
NAMES = {
    torch.float32: "Float",
    torch.int32: "Int",
    torch.bool: "Bool",
    torch.uint8: "Byte",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.float64: "Double",
    torch.int64: "Long",
    torch.int16: "Short",
    torch.float8_e4m3fn: "Float8_e4m3fn",
}
NUMELS = [0, 1, 4, 17, 1000, 5000, 60_000, 300_000]


@dataclass(frozen=True)
class Side:
    """What a rank sends, or means to receive."""

    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.numel} x {NAMES[self.dtype]} ({self.nbytes} bytes"

    def tensor(self, fill: int) -> torch.Tensor:
        return torch.full((self.numel,), fill % 2, dtype=torch.uint8).to(self.dtype)


@dataclass(frozen=True)
class Message:
    """``ident`` is its content: 0 or 1, which all dtypes have."""

    source: int
    target: int
    tag: int
    sent: Side
    wanted: Side
    ident: int

    @property
    def differs(self) -> bool:
        return self.sent != self.wanted


def _side(rng: random.Random) -> Side:
    return Side(rng.choice(list(NAMES)), rng.choice(NUMELS))


def _other(rng: random.Random, side: Side) -> Side:
    """Another side; half of the time one that has as many bytes."""
    alike = [Side(d, side.nbytes // d.itemsize) for d in NAMES if d != side.dtype and side.nbytes % d.itemsize == 0]
    others = [
        Side(side.dtype, side.numel + rng.choice([1, 7, 100_000])),
        _side(rng),
        rng.choice(alike),
        rng.choice(alike),
    ]
    return rng.choice([other for other in others if other != side])


def random_messages(seed: int, world_size: int, most: int, share: float) -> list[Message]:
    """Up to ``most`` messages between different ranks; ``share`` of them are wanted as something else."""
    rng = random.Random(seed)
    messages = []
    for index in range(rng.randrange(1, most + 1)):
        source, target = rng.sample(range(world_size), 2)
        sent = _side(rng)
        wanted = _other(rng, sent) if rng.random() < share else sent
        messages.append(Message(source, target, rng.choice([0, 5, 2**31 - 1]), sent, wanted, seed + index))
    return messages
