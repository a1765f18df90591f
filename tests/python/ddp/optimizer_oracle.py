"""Random models for distributed optimizers, and the same training in one process with the plain optimizer."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from support.devices import seeded

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]

OPTIMIZERS: list[Make] = [
    lambda groups: torch.optim.AdamW(groups, lr=2e-3, foreach=True),
    lambda groups: torch.optim.AdamW(groups, lr=2e-3, fused=True),
    lambda groups: torch.optim.Adam(groups, lr=2e-3, amsgrad=True),
    lambda groups: torch.optim.SGD(groups, lr=2e-3, momentum=0.9, nesterov=True),
    lambda groups: torch.optim.SGD(groups, lr=2e-3, momentum=0.9, dampening=0.5),
    lambda groups: torch.optim.RMSprop(groups, lr=1e-3, centered=True),
    lambda groups: torch.optim.Adagrad(groups, lr=2e-3),
    lambda groups: torch.optim.ASGD(groups, lr=2e-3, t0=3),
    lambda groups: torch.optim.Adadelta(groups, lr=0.1),
    lambda groups: torch.optim.Adamax(groups, lr=2e-3),
    lambda groups: torch.optim.NAdam(groups, lr=2e-3, decoupled_weight_decay=True),
    lambda groups: torch.optim.RAdam(groups, lr=2e-3, decoupled_weight_decay=True),
    lambda groups: torch.optim.Rprop(groups, lr=2e-3),
]


def draw(rng: random.Random, dtype: torch.dtype) -> Make:
    """Rprop, which steps by signs alone, for float64: a mean of fewer digits is often 0 in one order of sums, not in
    another."""
    return rng.choice(OPTIMIZERS if dtype == torch.float64 else OPTIMIZERS[:-1])


class SmallModel(torch.nn.Module):
    """Layers of random sizes, attention (which reads weights of a module that it does not call), a tied weight, a frozen
    layer, and a layer that runs first though it was registered last."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.width = 2 * rng.randint(1, 12)
        self.attention = torch.nn.MultiheadAttention(self.width, 2, bias=False, batch_first=True)
        sizes = [rng.choice([1, 5, 33, 64]) for _ in range(rng.randint(1, 4))]
        self.ups = torch.nn.ModuleList(torch.nn.Linear(self.width, size) for size in sizes)
        self.downs = torch.nn.ModuleList(torch.nn.Linear(size, self.width, bias=rng.random() < 0.5) for size in sizes)
        self.frozen = torch.nn.Linear(self.width, self.width).requires_grad_(False)
        self.gain = torch.nn.Parameter(torch.tensor(1.0))
        self.tied = torch.nn.Linear(self.width, sizes[0])
        self.tied.weight = self.ups[0].weight
        self.mix = torch.nn.Parameter(torch.randn(self.width, self.width + 1).t() / self.width)  # not contiguous
        self.first = torch.nn.Linear(self.width, self.width)
        self.to(dtype)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.to(self.dtype))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        for up, down in zip(self.ups, self.downs, strict=True):
            x = torch.tanh(x + down(torch.tanh(up(x))))
        x = x + torch.tanh(torch.nn.functional.pad(x, (0, 1)) @ self.mix)
        return ((self.frozen(x) * self.gain).double().square().mean() + self.tied(x).double().mean()).float()


def groups_of(module: torch.nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, the rest does not, and learns more slowly: neighbours in a bucket are in different groups."""
    trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return [
        {"params": [parameter for parameter in trainable if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in trainable if parameter.dim() < 2], "lr": 1e-3, "weight_decay": 0.0},
    ]


def batch_of(seed: int, step: int, rank: int, index: int, module: torch.nn.Module) -> torch.Tensor:
    generator = seeded(hash((seed, step, rank, index)))
    return torch.randn(2, 3, module.width, generator=generator)  # type: ignore[call-overload]


class Oracle:
    """One process: gradients of each rank's batches in turn, then averaged, in ``grad_dtype``, then the plain optimizer.

    It updates copies of the parameters in ``grad_dtype``, of bfloat16 ones in float32.
    """

    def __init__(self, module: torch.nn.Module, make: Make, grad_dtype: torch.dtype) -> None:
        self.module = module
        self.trainable = [parameter for parameter in module.parameters() if parameter.requires_grad]
        self.grad_dtype = grad_dtype
        copy_dtype = torch.float32 if grad_dtype == torch.bfloat16 else grad_dtype
        self.copies = {
            parameter: torch.nn.Parameter(parameter.detach().to(copy_dtype).clone()) for parameter in self.trainable
        }
        groups = groups_of(module)
        for group in groups:
            group["params"] = [self.copies[parameter] for parameter in group["params"]]
        self.optimizer = make(groups)
        self.tolerance = {torch.float64: 1e-9, torch.float32: 2e-3, torch.bfloat16: 3e-2}[module.dtype]  # type: ignore[index]

    def step(self, batches: list[list[torch.Tensor]], max_norm: float | None, norm_type: float) -> torch.Tensor:
        """``batches`` by rank. Returns the norm before clipping."""
        sums = [[torch.zeros_like(copy, dtype=self.grad_dtype) for copy in self.copies.values()] for _ in batches]
        for mine, of_rank in zip(sums, batches, strict=True):
            for batch in of_rank:
                grads = torch.autograd.grad(self.module(batch), self.trainable)
                torch._foreach_add_(mine, [grad.to(self.grad_dtype) for grad in grads])
        for index, copy in enumerate(self.copies.values()):
            copy.grad = (sum(mine[index] for mine in sums) / len(batches)).to(copy.dtype)
        copies = list(self.copies.values())
        norm = torch.zeros(())
        if max_norm is not None:
            norm = torch.nn.utils.clip_grad_norm_(copies, max_norm, norm_type)
        self.optimizer.step()
        with torch.no_grad():
            for parameter, copy in self.copies.items():
                parameter.copy_(copy)
        return norm

    def check(self, module: torch.nn.Module, where: str) -> None:
        for (name, want), got in zip(self.module.named_parameters(), module.parameters(), strict=True):
            error = (want.double() - got.double()).abs().max().item()
            assert error <= self.tolerance * (1 + want.double().abs().max().item()), f"{where} {name}: {error}"
