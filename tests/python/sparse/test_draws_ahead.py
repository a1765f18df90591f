"""Modules that draw random numbers ahead of a forward: said once, refused where that is asked for, and no others."""

from __future__ import annotations

import warnings

import pytest
import torch

from farandole.sparse import TrainPipelineSparseDist
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import ROWS, Batch, Recommender, drain, made, make_batches, plain_loop


class Jitter(torch.nn.Module):
    """Moves ids, by torch's global generator or by its own."""

    def __init__(self, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.generator = generator

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return ids
        moves = torch.randint(0, 3, ids.shape, generator=self.generator, device=ids.device)
        return (ids + moves) % ROWS


class Jittered(Recommender):
    def __init__(self, seed: int, jitter: torch.nn.Module, dropout: float) -> None:
        super().__init__(seed, dropout=dropout)
        self.jitter = jitter

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.score(torch.cat([self.tables[0](self.jitter(batch.ids)), batch.dense], 1), batch.labels)


def _made(jitter: torch.nn.Module, dropout: float = 0.5) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    return made(Jittered(1, jitter, dropout).to(DEVICE))


def _said(pipeline: TrainPipelineSparseDist, batches: list[Batch]) -> tuple[list[torch.Tensor], list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outputs = drain(pipeline, iter(batches))
    return outputs, [str(warning.message) for warning in caught if "draws from" in str(warning.message)]


def draw(rank: int, world_size: int) -> None:
    batches = make_batches(1, 5)
    for jitter in (Jitter(), torch.nn.Sequential(Jitter())):
        model, optimizer = _made(jitter)
        pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
        outputs, said = _said(pipeline, batches)
        assert len(outputs) == 5
        [text] = said
        assert text.startswith("'jitter' draws from torch's global generator ahead of forward"), text
        pipeline.detach()
        model, optimizer = _made(jitter)
        strict = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
        iterator = iter(batches)
        for _ in range(2):
            with pytest.raises(ValueError, match="'jitter' draws from torch's global generator"):
                strict.progress(iterator)
        strict.detach()
    # First evaluated, where it draws nothing, then trained.
    model, optimizer = _made(Jitter())
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    model.eval()
    assert _said(pipeline, batches)[1] == []
    model.train()
    assert len(_said(pipeline, batches)[1]) == 1


def draw_otherwise(rank: int, world_size: int) -> None:
    """By a generator of its own the numbers are those of the plain loop; what draws nothing is not warned of."""
    batches = make_batches(1, 5)
    for ours, theirs in (
        (Jitter(torch.Generator(DEVICE).manual_seed(3)), Jitter(torch.Generator(DEVICE).manual_seed(3))),
        (torch.nn.Identity(), torch.nn.Identity()),
    ):
        (model, optimizer), (plain, plain_optimizer) = _made(ours), _made(theirs)
        pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
        torch.manual_seed(5)
        outputs, said = _said(pipeline, batches)
        torch.manual_seed(5)
        assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, batches)))
        assert said == []


def test_draws_ahead_of_a_forward_are_said():
    run_ranks(draw, 2, "farandole")


def test_other_draws_are_none():
    run_ranks(draw_otherwise, 2, "farandole")
