"""A rank of the data-parallel benchmark: one backward at a time, of every wrapper in turn."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from farandole.bench._ranks import Rank
from farandole.bench._sleeping_rank import SleepInBackward
from farandole.ddp import DistributedDataParallel

ALONE, RAW, OURS = "alone", "all_reduce", "farandole"
# Hooks in Python that call all_reduce for each gradient, which moves nothing: what c10d itself costs there.
NOTHING = "hooks over fake"
_WIDTH, _BLOCKS = 576, 10  # 40 million parameters
_SMALL, _LAYERS = 16, 1000  # 2000 parameters
_SLEEPS, _SLEEPING_WIDTH = 10, 2048  # four million parameters in each: communication is some 15 % of the step


class _Block(nn.Module):
    """A transformer's: attention and a perceptron, each after a norm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 8, batch_first=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


class _Sleeping(nn.Module):
    """A weight whose gradient is there, before a set time that uses no core."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(_SLEEPING_WIDTH, _SLEEPING_WIDTH))
        self.prepared: list[torch.Tensor] = []
        self._seconds = seconds

    def prepare(self) -> None:
        self.prepared.append(torch.ones_like(self.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _WithGradient.apply(SleepInBackward.apply(x, self._seconds), self.weight, self.prepared)


class _WithGradient(torch.autograd.Function):
    """The identity; in backward the weight gets what is prepared. Autograd is its only owner then, as of any gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, prepared: list[torch.Tensor]) -> torch.Tensor:
        ctx.prepared = prepared
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        return grads[0], ctx.prepared.pop(), None


def _transformer() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(_Block(_WIDTH) for _ in range(_BLOCKS))), torch.randn(2, 16, _WIDTH)


def _small() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(nn.Linear(_SMALL, _SMALL) for _ in range(_LAYERS))), torch.randn(2, _SMALL)


def _sleeping() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(_Sleeping(0.01) for _ in range(_SLEEPS))), torch.randn(8).requires_grad_()


# The module and its input.
CASES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor]]] = {
    "transformer, 40M": _transformer,
    "2000 parameters": _small,
    "sleeping": _sleeping,
}
# Arguments of farandole's wrapper, where it does not go with its defaults, which would make one bucket of all: one for
# four stages, since the start of a reduction on a core that was idle takes 0.1 ms of the backward.
OPTIONS: dict[str, dict[str, int]] = {"sleeping": {"bucket_size": 4 * _SLEEPING_WIDTH**2}}


def time_backwards(rank: Rank, case: str, peers: list[str], count: int) -> dict[str, list[float]]:
    """Runs on all ranks: seconds of a forward and backward by peer, which take turns; of RAW those of one all_reduce.

    Each turn begins with another peer: what a step costs depends on the memory that the one before it has left.
    """
    torch.set_num_threads(1)
    key = (case, tuple(peers))
    if key not in rank.state:
        rank.state[key] = {peer: _step_of(rank, case, peer) for peer in peers}
        for prepare, step in rank.state[key].values():
            for _ in range(2):
                prepare()
                step()
    taken: dict[str, list[float]] = {peer: [] for peer in peers}
    turns = [*peers]
    for _ in range(count):
        turns.append(turns.pop(0))
        for peer in turns:
            prepare, step = rank.state[key][peer]
            prepare()  # for which one rank may take longer: not while the other one waits for it by the clock
            dist.barrier(rank.groups["farandole"])
            taken[peer].append(step())
    return taken


def _step_of(rank: Rank, case: str, peer: str) -> tuple[Callable[[], None], Callable[[], float]]:
    """What is done before the clock starts, and the step."""
    torch.manual_seed(0)
    module, x = CASES[case]()
    if peer == RAW:
        flat = torch.zeros(sum(parameter.numel() for parameter in module.parameters()))
        return lambda: None, lambda: _timed(lambda: dist.all_reduce(flat, group=rank.groups["farandole"]))
    wrapped: nn.Module = module
    if peer == OURS:
        options: dict[str, Any] = OPTIONS.get(case, {})
        wrapped = DistributedDataParallel(module, process_group=rank.groups["farandole"], **options)
    elif peer == NOTHING:
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(partial(_start_nothing, rank.groups["fake"]))
    elif peer != ALONE:
        backend = peer.removeprefix("torch over ")
        wrapped = nn.parallel.DistributedDataParallel(module, process_group=rank.groups[backend])

    def prepare() -> None:
        for parameter in module.parameters():
            parameter.grad = None
        for stage in module.modules():
            if isinstance(stage, _Sleeping):
                stage.prepare()

    return prepare, lambda: _timed(lambda: wrapped(x).square().mean().backward())


def _start_nothing(group: dist.ProcessGroup, parameter: torch.Tensor) -> None:
    dist.all_reduce(parameter.grad, group=group, async_op=True)


def _timed(fn: Callable[[], Any]) -> float:
    start = time.perf_counter()
    fn()
    return time.perf_counter() - start
