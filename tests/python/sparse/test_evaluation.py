"""Batches in eval mode, within a window of gradient accumulation too, leave nothing behind in the model's wrappers."""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from farandole.sparse import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import Batch, Mean, assert_same, made, make_batches, on_device

KINDS = {
    "base": (TrainPipelineBase, {}),
    "sparse": (TrainPipelineSparseDist, {}),
    "prefetch": (PrefetchTrainPipelineSparseDist, {}),
    "hooks": (TrainPipelineSparseDist, {"tracing": "hooks"}),
}


def evaluate_between(rank: int, world_size: int, seed: int, kind: str, has_own: bool) -> None:
    """A plain loop that evaluates in no_grad, as is usual, to the bit; by one pipeline, or one for each mode."""
    pick = random.Random(seed)
    number, grad_accum = 12, pick.choice([2, 3])
    modes = [pick.random() < 0.6 for _ in range(number)]
    print(f"seed {seed}: windows of {grad_accum}, training {modes}")
    (model, optimizer), (plain, plain_optimizer) = made(seed), made(seed)
    make, options = KINDS[kind]
    pipeline = make(model, optimizer, DEVICE, grad_accum=grad_accum, **options)
    evaluating = EvalPipelineSparseDist(model, optimizer, DEVICE, **options) if has_own else pipeline
    batches = make_batches(seed, number)
    of_modes = {mode: iter([b for b, m in zip(batches, modes, strict=True) if m == mode]) for mode in (True, False)}
    all_batches = iter(batches)
    windows = 0
    for batch, is_training in zip(batches, modes, strict=True):
        model.train(is_training)
        plain.train(is_training)
        source = of_modes[is_training] if has_own else all_batches
        output = (pipeline if is_training else evaluating).progress(source)
        if is_training:
            expected = train(plain, plain_optimizer, batch, windows, grad_accum)
            windows += 1
        else:
            with torch.no_grad():
                expected = plain(on_device(batch))[1]
        assert torch.equal(output, expected)
        for (name, part), (_, other) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
            assert part.grad is None or torch.equal(part.grad, other.grad), name
    assert_same(model, plain)


def train(
    plain: DistributedDataParallel, optimizer: torch.optim.Optimizer, batch: Batch, done: int, grad_accum: int
) -> torch.Tensor:
    is_last = done % grad_accum == grad_accum - 1
    if done % grad_accum == 0:
        optimizer.zero_grad()
    with contextlib.nullcontext() if is_last else plain.no_sync():
        losses, output = plain(on_device(batch))
        torch.sum(losses / grad_accum, dim=0).backward()
    if is_last:
        optimizer.step()
    return output


@pytest.mark.sample(5)
@pytest.mark.parametrize(("kind", "has_own"), [(kind, False) for kind in KINDS] + [("sparse", True), ("hooks", True)])
@pytest.mark.filterwarnings("ignore:no sharded module has a cache", "ignore:sharded modules exchange")
def test_an_evaluation_within_a_window_changes_nothing(kind, has_own):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_ranks(evaluate_between, 2, "farandole", seed=seed, kind=kind, has_own=has_own)


@pytest.mark.parametrize("is_training", [False, True])
def test_only_what_has_a_backward_makes_a_graph(is_training):
    seen = []

    class Graded(Mean):
        def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            seen.append(torch.is_grad_enabled())
            return super().forward(batch)

    model = Graded().to(DEVICE).train(is_training)
    pipeline = TrainPipelineBase(model, torch.optim.SGD(model.parameters(), lr=0.1), DEVICE)
    pipeline.progress(iter([torch.ones(2)]))
    assert seen == [is_training] and torch.is_grad_enabled()
