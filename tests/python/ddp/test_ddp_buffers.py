"""Buffers are broadcast as they are in each forward, wherever they have come from since the module was wrapped."""

import torch
from torch import nn

from farandole.ddp import DistributedDataParallel
from support.devices import DEVICE
from support.processes import run_ranks


class _Reads(nn.Module):
    """Adds all of its buffers to its input; ``writes`` puts new ones in their places first."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("first", torch.full((3,), float(rank)))
        self.inner = nn.Module()
        self.writes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            self.first = self.first + 1
        return self.layer(x) + sum(buffer.sum() for buffer in self.buffers())


def _changes(rank: int, world_size: int) -> None:
    module = _Reads(rank).to(DEVICE)
    model = DistributedDataParallel(module)
    x = torch.ones(2, 3, device=DEVICE)

    def check(*expected: float) -> None:
        model(x).sum().backward()
        assert [buffer.mean().item() for buffer in module.buffers()] == [*expected]

    check(0)
    module.first = torch.full((3,), 10.0 + rank, device=DEVICE)
    check(10)
    module.writes = True  # after the broadcast
    check(11)
    check(12)
    module.writes = False
    module.inner.register_buffer("second", torch.full((2,), 20.0 + rank, device=DEVICE))
    check(12, 20)
    module.inner.add_module("deep", nn.Module())
    module.inner.deep.register_buffer("third", torch.full((), 30.0 + rank, device=DEVICE))
    check(12, 20, 30)
    module.inner.deep = nn.Module()
    module.inner.deep.register_buffer("fourth", torch.full((), 40.0 + rank, device=DEVICE))
    check(12, 20, 40)
    del module.inner.second
    check(12, 40)
    module.inner.deep.to(torch.float64)
    module.inner.deep.fourth.fill_(50.0 + rank)
    check(12, 50)


def test_buffers_are_broadcast_as_they_are_in_each_forward():
    run_ranks(_changes, 2, "farandole")
