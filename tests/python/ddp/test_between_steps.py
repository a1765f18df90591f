"""Whatever is frozen, written, saved, loaded or set between steps, sharded models train as those that are not."""

import copy
import random
from typing import Any

import pytest
import torch

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import DEVICE, seeded
from support.processes import run_ranks

SHARDED = {"use_distributed_optimizer": True}
OVERLAPPING = {**SHARDED, "overlap_param_gather": True}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sharded": (SHARDED, {}),
    "overlapping": (OVERLAPPING, {}),
    "in parts": (OVERLAPPING, {"overlap_param_gather_with_optimizer_step": True}),
    "whole": (SHARDED, {"is_elementwise": False}),
}
OPTIMIZERS: list[tuple[Any, dict[str, Any]]] = [  # whose steps do not depend on how many there were
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.003, "momentum": 0.3, "centered": True, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"lr": 0.02, "weight_decay": 0.1}),
]
ACTIONS = ["nothing", "write", "load", "load into another", "save", "set", "skip", "broadcast"]


class _Trained:
    """By random decisions that are those of the seed, with a layout that is not."""

    def __init__(self, seed: int, kind: tuple[dict[str, Any], dict[str, Any]], layout: random.Random) -> None:
        self._rng, self._kind, self._layout = random.Random(seed), kind, layout
        self._dtype = self._rng.choice([torch.float32, torch.bfloat16])
        self._made, self._settings = self._rng.choice(OPTIMIZERS)
        self._make()

    def _make(self) -> None:
        for_model, for_optimizer = self._kind
        torch.manual_seed(1)
        module = torch.nn.Sequential(*(torch.nn.Linear(*sizes) for sizes in ((6, 20), (20, 20), (20, 6))))
        self.model = DistributedDataParallel(
            module.to(DEVICE, self._dtype),
            unused_parameters=self._layout.choice(["skip", "zero_fill"]),
            bucket_size=self._layout.choice([1, 150, None]),
            grad_reduce_in_fp32=True,
            **for_model,
        )
        inner = self._made(self.model.parameters(), **self._settings)
        self.optimizer = DistributedOptimizer(inner, self.model, **for_optimizer)

    def _load_into_another(self) -> None:
        state, module = self.optimizer.full_state_dict(), self.model.module
        self._make()
        self.model.module.load_state_dict(module.state_dict())
        self.optimizer.load_state_dict(state)
        for new, old in zip(self.model.module.parameters(), module.parameters(), strict=True):
            new.requires_grad_(old.requires_grad)

    def step(self, x: torch.Tensor) -> None:
        layers = list(self.model.module)
        for layer in layers:
            if self._rng.random() < 0.25:
                layer.requires_grad_(not layer.weight.requires_grad)
        if not any(layer.weight.requires_grad for layer in layers):
            self.model.requires_grad_(True)
        action = self._rng.choice(ACTIONS)
        if action == "write":
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.clamp_(-0.2, 0.2)
        elif action == "load":
            self.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        elif action == "load into another":
            self._load_into_another()
        elif action == "save":
            self.optimizer.state_dict()
        elif action == "set":
            self.optimizer.param_groups[0]["lr"] *= 0.5
        elif action == "broadcast":
            self.model.broadcast_params()
        self.optimizer.zero_grad()
        self.model(x.to(DEVICE, self._dtype)).float().square().mean().backward()
        if self._rng.random() < 0.4:
            self.optimizer.clip_grad_norm_(0.2)
        if action != "skip":
            self.optimizer.step()


def _train(rank: int, world_size: int, kind: str, seeds: range) -> None:
    for seed in seeds:
        layout = random.Random(f"{kind} {seed}")
        plain, ours = _Trained(seed, ({}, {}), layout), _Trained(seed, KINDS[kind], layout)
        for step in range(7):
            x = torch.randn(4, 6, generator=seeded(10 * step + rank))
            for trained in (plain, ours):
                trained.step(x)
            for (name, value), expected in zip(ours.model.named_parameters(), plain.model.parameters(), strict=True):
                tolerance = 1e-4 if value.dtype == torch.float32 else 1e-2
                difference = (value - expected).abs().max()
                assert difference < tolerance, (seed, step, name, difference)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_sharded_models_train_as_others_whatever_is_done_between_steps(kind, world_size):
    run_ranks(_train, world_size, "farandole", timeout=100, kind=kind, seeds=range(20))
