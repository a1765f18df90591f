"""Forwards that no backward follows, wherever they come: they leave steps what they are, and see current parameters."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any

import pytest
import torch
from ddp_models import BACKENDS, fewer
from told_layers import CLOSE

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import seeded
from support.processes import await_all, run_ranks

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "skip": {"unused_parameters": "skip", "bucket_size": 1},
    "float32": {"grad_reduce_in_fp32": True},
    "sharded": {"use_distributed_optimizer": True, "overlap_param_gather": True, "bucket_size": 1},
}
PLACES = ("before the first step", "before forward", "before backward", "before step", "while accumulating")


class _Model(torch.nn.Module):
    """Its input decides whether the trained layers count in the output; one part is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        self.frozen = torch.nn.Linear(6, 6).requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor, trains: bool = True) -> torch.Tensor:
        self.calls += 1
        x = self.frozen(x)
        return self.second(torch.tanh(self.first(x))) if trains else x


def _look(how: str, model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A forward that is not trained on."""
    if how in ("no_grad", "inference_mode"):
        with getattr(torch, how)():
            return model(x).clone()
    if how == "evaluation":
        model.eval()
        output = model(x)
        model.train()
        return output.detach()
    if how == "frozen":
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            parameter.requires_grad_(False)
        output = model(x)
        for parameter in trained:
            parameter.requires_grad_(True)
        assert not output.requires_grad
        return output
    output = model(x, trains=False)  # of which no trained parameter is a part
    assert how == "untrained" and not output.requires_grad
    return output


HOWS = ("no_grad", "inference_mode", "evaluation", "frozen", "untrained")


def _batch(seed: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=seeded(100 * seed + rank))


def _train(rank: int, world_size: int, kind: str, seed: int) -> None:
    for how, place in itertools.product(HOWS, PLACES):
        _steps(rank, world_size, kind, how, place, seed)
    await_all(rank, world_size)


def _steps(rank: int, world_size: int, kind: str, how: str, place: str, seed: int) -> None:
    rng = random.Random(seed)
    where = f"seed {seed}: {kind}, {how} {place}"
    plain = _Model()
    model = DistributedDataParallel(_Model(), **KINDS[kind])
    expected, inner = (
        torch.optim.SGD((p for p in one.parameters() if p.requires_grad), lr=0.3, momentum=0.9)
        for one in (plain, model)
    )
    optimizer: Any = DistributedOptimizer(inner, model) if kind in ("float32", "sharded") else inner

    def look(now: str, step: int) -> None:
        if now != place or (now == PLACES[0] and step > 0):
            return
        for _ in range(rng.randint(1, 2)):
            x = _batch(50 + step, rank)
            output = _look(how, model, x)
            with torch.no_grad():
                want = plain(x, trains=how != "untrained")
            torch.testing.assert_close(output, want, **CLOSE, msg=where)

    for step in range(fewer(4)):
        look(PLACES[0], step)
        optimizer.zero_grad()
        count = rng.randint(1, 2)
        for number in range(count):
            last = number == count - 1
            with contextlib.nullcontext() if last else model.no_sync():
                look("before forward", step)
                loss = model(_batch(2 * step + number, rank)).square().mean()
                look("before backward", step)
                if not last:
                    look("while accumulating", step)
                loss.backward()
        look("before step", step)
        optimizer.step()
        expected.zero_grad()
        for number, other in itertools.product(range(count), range(world_size)):
            (plain(_batch(2 * step + number, other)).square().mean() / world_size).backward()
        expected.step()
    for name, value in model.named_parameters():  # which waits for them
        want = plain.get_parameter(name.removeprefix("module."))
        torch.testing.assert_close(value, want, **CLOSE, msg=f"{where}: {name}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_what_they_are_without_them(kind, backend):
    seed = random.randrange(2**30)
    print(f"seed {seed}")
    run_ranks(_train, 2, backend, timeout=120, kind=kind, seed=seed)
