"""What a program computes beside its communication."""

from __future__ import annotations

import torch

_WIDTH = 128  # three matrices of 64 KiB: they stay in the cache of a core


def multiply(times: int) -> None:
    """A fixed work for one core, which hardly touches memory."""
    a, b, product = torch.ones(3, _WIDTH, _WIDTH)
    for _ in range(times):
        torch.mm(a, b, out=product)
