"""Random models, the same from the same seed on every rank."""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

import farandole  # noqa: F401  (registers its backend, where it has one)
from support.devices import ON_CPU, seeded

BACKENDS = [name for name in ("gloo", "farandole") if name in dist.Backend.backend_list]
DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def fewer(count: int) -> int:
    """Steps or cases: ranks that share a GPU take a time slice of it for each part of a collective."""
    return count if ON_CPU else max(1, count // 3)


class Block(torch.nn.Module):
    """A residual pair of layers of random sizes."""

    def __init__(self, rng: random.Random, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden = rng.choice([1, 3, 17, 64, 700])  # the last: gradients that are not copied
        self.up = torch.nn.Linear(width, hidden, bias=rng.random() < 0.5, dtype=dtype)
        self.down = torch.nn.Linear(hidden, width, dtype=dtype)
        self.scale = torch.nn.Parameter(torch.ones(width, dtype=dtype))
        self.act = rng.choice([torch.tanh, torch.relu, torch.nn.functional.gelu])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.scale.dtype)
        return x + self.scale * self.down(self.act(self.up(x)))


class RandomModel(torch.nn.Module):
    """Blocks of several types, with ties, frozen parameters, a transposed weight, a scalar and a buffer.

    With ``branches`` the input decides which blocks run, in which order, and how often.
    """

    def __init__(self, seed: int, branches: bool = False) -> None:
        super().__init__()
        self.branches = branches
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.width = rng.choice([2, 5, 32])
        dtypes = rng.sample(DTYPES, rng.randint(1, 3))
        self.blocks = torch.nn.ModuleList(Block(rng, self.width, rng.choice(dtypes)) for _ in range(rng.randint(1, 5)))
        first = self.blocks[0]
        for block in self.blocks[1:]:
            if rng.random() < 0.4 and block.scale.dtype == first.scale.dtype:
                block.scale = first.scale
            if rng.random() < 0.3:
                block.up.requires_grad_(False)
        self.mix = torch.nn.Parameter(torch.randn(self.width, self.width, dtype=dtypes[0]).t())
        self.gain = torch.nn.Parameter(torch.tensor(1.0))
        self.register_buffer("offset", torch.full((self.width,), 0.25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = (x + self.offset).to(self.mix.dtype) @ self.mix
        for block in self._chosen(x) if self.branches else self.blocks:
            x = block(x)
        return (x.float() * self.gain).square().mean()

    def _chosen(self, x: torch.Tensor) -> list[torch.nn.Module]:
        rng = random.Random(x.detach().double().sum().item())
        return rng.choices(list(self.blocks), k=rng.randint(0, len(self.blocks) + 1))

    def batch(self, *seed: int) -> torch.Tensor:
        generator = seeded(hash(seed))
        return torch.randn(4, self.width, generator=generator)


def perturb(model: torch.nn.Module, rank: int) -> None:
    """Makes the models of ranks other than 0 wrong, so that only a broadcast makes them equal again."""
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.add_(rank)


def grads(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    """By name, without a wrapper's prefix."""
    return {name.removeprefix("module."): parameter.grad for name, parameter in model.named_parameters()}
