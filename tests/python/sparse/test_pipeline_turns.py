"""Several pipelines of one model in random turns, with states that are saved and loaded in between: as the plain loop."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist

from farandole.sparse import EvalPipelineSparseDist, TrainPipelineSparseDist
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import Batch, assert_same, is_same, made, make_batches, on_device

_TURNS = 40


class Plain:
    """One batch at a time, in windows."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def train(self, batch: Batch, filled: int, size: int) -> torch.Tensor:
        if filled == 0:
            self.optimizer.zero_grad()
        self.model.require_backward_grad_sync = filled == size - 1
        losses, output = self.model(on_device(batch))
        torch.sum(losses / size, dim=0).backward()
        self.model.require_backward_grad_sync = True
        if filled == size - 1:
            self.optimizer.step()
        return output

    def close(self) -> None:
        """A window that the end of the data cuts short: torch would have averaged it in its last backward."""
        for part in self.model.module.dense.parameters():
            part.grad *= 1.0 / dist.get_world_size()
            dist.all_reduce(part.grad)
        self.optimizer.step()

    def evaluate(self, batch: Batch) -> torch.Tensor:
        with torch.no_grad():
            return self.model(on_device(batch))[1]


@dataclass
class Turns:
    """A pipeline, and what it should have."""

    pipeline: TrainPipelineSparseDist
    trains: bool
    executes_all: bool
    size: int
    filled: int = 0
    batches: Iterator[Batch] | None = None
    flying: list[Batch] = field(default_factory=list)


def made_turns(pick: random.Random, model: Any, optimizer: Any) -> Turns:
    trains, executes_all, size = pick.random() < 0.7, pick.random() < 0.6, pick.choice([1, 2, 3])
    options: dict[str, Any] = {key: pick.choice([True, False, None]) for key in ("load_on_thread", "dist_on_thread")}
    if trains:
        options["grad_accum"] = size
    kind = TrainPipelineSparseDist if trains else EvalPipelineSparseDist
    return Turns(
        kind(model, optimizer, DEVICE, execute_all_batches=executes_all, **options), trains, executes_all, size
    )


def states(model: Any, optimizer: Any) -> Any:
    return copy.deepcopy((model.state_dict(), optimizer.state_dict()))


def load(model: Any, optimizer: Any, state: Any) -> None:
    weights, steps = copy.deepcopy(state)
    model.load_state_dict(weights)
    optimizer.load_state_dict(steps)


def take_turns(rank: int, world_size: int, seed: int) -> None:
    warnings.simplefilter("ignore")
    pick = random.Random(seed)
    kind = pick.choice([torch.optim.SGD, torch.optim.Adam])
    (model, optimizer), (other, other_optimizer) = (made(seed, kind, 0.05) for _ in range(2))
    plain = Plain(other, other_optimizer)
    pipelines = [made_turns(pick, model, optimizer) for _ in range(pick.randint(2, 4))]
    saved: Any = None
    for turn in range(_TURNS):
        now = next((each for each in pipelines if each.filled), pick.choice(pipelines))
        if pick.random() < 0.5 and not now.trains:
            now = pick.choice(pipelines)
        elif now.filled and pick.random() < 0.3:  # an evaluation in a window
            now = next((each for each in pipelines if not each.trains), now)
        if now.batches is None:
            batches = make_batches(1000 * seed + turn, pick.randint(0, 5))
            now.batches = iter(batches)
            now.flying += batches
        if pick.random() < 0.15:
            saved = states(model, optimizer), states(other, other_optimizer)
        elif saved is not None and pick.random() < 0.15:
            load(model, optimizer, saved[0])
            load(other, other_optimizer, saved[1])
        elif now.filled == 0 and pick.random() < 0.1:
            now.pipeline.detach()
        is_end = len(now.flying) < (1 if now.executes_all else 3)
        if is_end:
            with pytest.raises(StopIteration):
                now.pipeline.progress(now.batches)
            now.batches = None
            if now.filled and now.executes_all:
                plain.close()
                now.filled = 0
            continue
        output, batch = now.pipeline.progress(now.batches), now.flying.pop(0)
        if now.trains:
            expected = plain.train(batch, now.filled, now.size)
            now.filled = (now.filled + 1) % now.size
        else:
            expected = plain.evaluate(batch)
        assert is_same(output, expected), turn
        assert_same(model, other)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_pipelines_of_one_model_take_turns_and_states_are_loaded_in_between(world_size):
    seed = random.randrange(1 << 20)
    for each in range(seed, seed + 3):
        print(f"seed {each}")
        run_ranks(take_turns, world_size, "farandole", timeout=120, seed=each)
