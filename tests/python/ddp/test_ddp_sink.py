"""A backward ends with the averages also where all gradients come inside backwards that it runs itself."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS, fewer, grads
from torch.nn.parallel import DistributedDataParallel as TorchDdp
from torch.utils.checkpoint import checkpoint

from farandole.ddp import DistributedDataParallel
from support.devices import backend_for, seeded
from support.processes import run_ranks

CASES = fewer(10)


@dataclass
class _Output:
    logits: torch.Tensor
    name: str = "logits"


def _nested(output: torch.Tensor, kind: str) -> Any:
    match kind:
        case "tensor":
            return output
        case "list":
            return [None, [output, 3]]
        case "dict":
            return {"a": "text", "b": {"logits": output}}
        case "dataclass":
            return {"out": _Output(output)}
        case "view":
            return output[1:]
        case "in_place":
            return output
    raise ValueError(kind)


def _tensor_of(output: Any) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output
    if isinstance(output, list):
        return output[1][0]
    return output["b"]["logits"] if "b" in output else output["out"].logits


def _loss(model: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
    output = _tensor_of(model(x))
    if kind in ("view", "in_place"):
        output.mul_(2)
    return output.square().sum()


class _AllInside(torch.nn.Module):
    """Every trainable parameter is in some reentrant checkpoint, some in several; some get no gradient."""

    def __init__(self, rng: random.Random, kind: str, shares: bool) -> None:
        super().__init__()
        torch.manual_seed(rng.randrange(10**6))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(rng.randint(1, 4)))
        self.unused = torch.nn.Linear(6, 2) if rng.random() < 0.5 else torch.nn.Identity()
        self.calls = list(range(len(self.layers)))
        if shares:
            self.calls += [rng.choice(self.calls) for _ in range(2)]
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        for i in self.calls:
            x = checkpoint(self.layers[i], x, use_reentrant=True)
        return _nested(x, self.kind)


def _train(rank: int, world_size: int, seeds: list[int]) -> None:
    gloo = dist.new_group(backend=backend_for("gloo"))
    for seed in seeds:
        rng = random.Random(seed)
        kind = rng.choice(["tensor", "list", "dict", "dataclass", "view", "in_place"])
        static = rng.random() < 0.5
        module = _AllInside(rng, kind, shares=static)
        # torch cannot find what is unused below reentrant checkpoints, but in a static graph.
        theirs_module = copy.deepcopy(module)
        if kind == "dataclass":  # in which torch finds no tensors
            theirs_module.kind = "dict"
        theirs = TorchDdp(theirs_module, process_group=gloo, static_graph=True)
        ours = DistributedDataParallel(
            module, static_graph=static, unused_parameters="skip", bucket_size=rng.choice([1, 50, None])
        )
        for step in range(4):
            generator = seeded(hash((seed, step, rank)))
            x = torch.randn(3, 6, generator=generator)
            for model in (theirs, ours):
                model.zero_grad()
                _loss(model, x.clone().requires_grad_(), kind).backward()
            for name, grad in grads(theirs).items():
                where = f"seed {seed} step {step} rank {rank} {kind} static {static} {name}"
                mine = grads(ours)[name]
                if name.startswith("unused"):
                    assert mine is None, where
                    continue
                if world_size <= 2:
                    assert torch.equal(grad, mine), where
                else:
                    assert torch.allclose(grad, mine, rtol=1e-4, atol=1e-6), where


@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_checkpoints_that_hold_every_parameter_train_as_under_torch_ddp(backend, world_size):
    first = random.SystemRandom().randrange(10**6)
    seeds = list(range(first, first + CASES))
    print(f"seeds {seeds[0]} to {seeds[-1]}")
    run_ranks(_train, world_size, backend, timeout=120, seeds=seeds)


class _Plain(torch.nn.Module):
    def __init__(self, kind: str = "tensor") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.used, self.spare = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
        self.kind = kind
        self.returned: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        self.returned = _nested(self.used(x), self.kind)
        return self.returned


def _inside(rank: int, world_size: int) -> None:
    """The whole wrapper is called again inside a backward: its round ends there."""
    for rounds in (1, 2):
        module = _Plain()
        model = DistributedDataParallel(module, find_unused_parameters=True)
        x = torch.full((2, 3), 1.0 + rank, requires_grad=True)
        y = x
        for _ in range(rounds):
            y = checkpoint(model, y, use_reentrant=True)
        y.square().sum().backward()
        mean = model.module.used.weight.grad.clone()
        dist.all_reduce(mean)
        assert torch.equal(mean / world_size, model.module.used.weight.grad)
        assert model.module.spare.weight.grad is None


def test_a_wrapper_inside_a_checkpoint_reduces_there():
    run_ranks(_inside, 2, "gloo")


def _untouched(rank: int, world_size: int) -> None:
    for kind in ("tensor", "list", "dict", "dataclass"):
        model = DistributedDataParallel(_Plain(kind), find_unused_parameters=True)
        output = model(torch.ones(2, 3))
        assert output is model.module.returned
        # A backward that wants the gradient of an input alone reduces nothing.
        torch.autograd.grad(_tensor_of(output).sum(), model.module.used.bias, retain_graph=True)
        assert model.module.used.bias.grad is None
        _tensor_of(output).sum().backward()
        assert model.module.used.bias.grad is not None
    model = DistributedDataParallel(_Returns(torch.ones(2)), find_unused_parameters=True)
    assert model(3) == 3
    assert model(torch.ones(2, 3)).grad_fn is None


class _Returns(torch.nn.Module):
    """What it gets, or its parameter."""

    def __init__(self, value: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(value)

    def forward(self, x: Any) -> Any:
        return x


def test_outputs_are_those_of_the_module():
    run_ranks(_untouched, 2, "gloo")
