"""Attributes of the model that inputs are computed with, changed between two steps: as the plain loop."""

from __future__ import annotations

import random
import re
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from farandole.sparse import EvalPipelineSparseDist, TrainPipelineSparseDist
from support.devices import DEVICE, only_on_cpu
from support.processes import await_all, run_ranks
from support.recommenders import (
    ROWS,
    Batch,
    Recommender,
    ShardedTables,
    assert_same,
    drain,
    made,
    make_batches,
    on_device,
    plain_loop,
)

AT_ONCE = 12.0  # seconds, on a machine that does other things; groups time out after 60


class Arch(torch.nn.Module):
    """The sharded module, with buffers of its own beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ShardedTables(3)
        self.register_buffer("others", torch.arange(ROWS, device=DEVICE))
        self.shift = torch.nn.Parameter(torch.zeros((), dtype=torch.int64, device=DEVICE), requires_grad=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(self.others[(ids + self.shift) % ROWS])


class Count(torch.nn.Module):
    """Runs ahead, and keeps something of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return ids + self.calls


class Shifted(Recommender):
    def __init__(self, counts: bool = False) -> None:
        super().__init__(1)
        self.arch = Arch()
        self.count = Count() if counts else None
        self.register_buffer("offset", torch.zeros((), dtype=torch.int64, device=DEVICE))
        tables = [name for name, _ in self.named_parameters() if "table" in name or name == "arch.shift"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self, tables)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        ids = batch.ids + self.offset * 2
        rows = self.arch(ids if self.count is None else self.count(ids)) + self.tables[0](batch.ids + self.offset)
        return self.score(torch.cat([rows, batch.dense], 1), batch.labels)


def wrapped(counts: bool = False, **options: Any) -> tuple[Any, torch.optim.Optimizer]:
    model = DistributedDataParallel(Shifted(counts), **options)
    return model, torch.optim.SGD([part for part in model.parameters() if part.requires_grad], lr=0.02)


def state_of(model: Any, by: int) -> dict[str, torch.Tensor]:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["offset"].fill_(by)
    state["arch.others"].copy_(model.arch.others.roll(by))
    return state


CHANGES: dict[str, Callable[[Any, int], object]] = {
    "nothing": lambda model, by: None,
    "written to": lambda model, by: model.offset.fill_(by),
    "another one": lambda model, by: setattr(model, "offset", torch.full_like(model.offset, by)),
    "within a module": lambda model, by: model.arch.others.copy_(model.arch.others.roll(by)),
    "a frozen parameter": lambda model, by: model.arch.shift.fill_(by),
    "no other value": lambda model, by: model.offset.add_(0),
    "a state is loaded": lambda model, by: model.load_state_dict(state_of(model, by)),
    "a state takes the place": lambda model, by: model.load_state_dict(state_of(model, by), assign=True),
}


def change(rank: int, world_size: int, seed: int, counts: bool, broadcasts: bool, threads: bool | None) -> None:
    pick = random.Random(seed)
    (model, optimizer), (plain, plain_optimizer) = (wrapped(counts, broadcast_buffers=broadcasts) for _ in range(2))
    pipeline = TrainPipelineSparseDist(
        model, optimizer, DEVICE, strict=True, load_on_thread=threads, dist_on_thread=threads
    )
    batches = make_batches(seed, 24)
    iterator = iter(batches)
    # A state that takes the place would leave the optimizer with other parameters.
    names = [name for name in CHANGES if name != "a state takes the place"]
    for number, batch in enumerate(batches):
        name, by = pick.choice(names), pick.randint(1, ROWS)
        told = f"seed {seed}, batch {number}: {name}"
        print(told)
        for each in (model.module, plain.module):
            with torch.no_grad():
                CHANGES[name](each, by)
        output = pipeline.progress(iterator)
        [expected] = plain_loop(plain, plain_optimizer, [batch])
        assert torch.equal(output, expected), told
    assert_same(model, plain)
    # Not always of 'offset': what changes it may all come to batches that stay in their forward, after others.
    assert re.search(r"since '(offset|arch\.others|arch\.shift)'", pipeline.explain())


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("broadcasts", [False, True])
@pytest.mark.parametrize("counts", [False, True])
def test_what_a_buffer_is_between_steps_goes_for_the_next_batch(counts, broadcasts, threads):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    run_ranks(change, 2, "farandole", seed=seed, counts=counts, broadcasts=broadcasts, threads=threads)


def evaluate(rank: int, world_size: int, seed: int) -> None:
    pick = random.Random(seed)
    model, optimizer = wrapped()
    pipeline = EvalPipelineSparseDist(model, optimizer, DEVICE, strict=True)
    batches = make_batches(seed, 24)
    iterator = iter(batches)
    for number, batch in enumerate(batches):
        name, by = pick.choice([*CHANGES]), pick.randint(1, ROWS)
        told = f"seed {seed}, batch {number}: {name}"
        with torch.no_grad():
            CHANGES[name](model.module, by)
            output = pipeline.progress(iterator)
            assert torch.equal(output, model(on_device(batch))[1]), told


def test_what_a_buffer_is_between_steps_goes_for_the_next_evaluation():
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    run_ranks(evaluate, 2, "farandole", seed=seed)


def name_it(rank: int, world_size: int) -> None:
    model, optimizer = wrapped()
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
    iterator = iter(make_batches(1, 6))
    pipeline.progress(iterator)
    for _ in range(2):
        model.module.offset.add_(1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            pipeline.progress(iterator)
    reason = "'offset' was changed after inputs had been computed with it"
    assert (
        pipeline.explain().splitlines()[-1] == f"2 batches have exchanged inputs again, in the forward, since {reason}"
    )
    model.module.arch.others.add_(1).remainder_(ROWS)
    pipeline.progress(iterator)
    assert "1 batch has exchanged inputs again, in the forward, since 'arch.others' was changed" in pipeline.explain()
    assert not [
        warning for warning in caught if "exchanges its inputs again" in str(warning.message)
    ]  # but for the first


def test_it_is_named_and_counted():
    run_ranks(name_it, 2, "farandole")


def leave(rank: int, world_size: int, kind: type) -> None:
    """DDP writes buffers in each forward, with what they hold."""
    model = kind(Shifted())
    optimizer = torch.optim.SGD([part for part in model.parameters() if part.requires_grad], lr=0.02)
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
    assert len(drain(pipeline, iter(make_batches(1, 5)))) == 5
    assert "exchanged" not in pipeline.explain()


def test_what_nobody_changes_is_exchanged_once():
    run_ranks(leave, 2, "farandole", kind=DistributedDataParallel)


def change_alone(rank: int, world_size: int, culprit: int, broadcasts: bool) -> None:
    model, optimizer = wrapped(broadcast_buffers=broadcasts)
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
    iterator = iter(make_batches(1, 6))
    for _ in range(2):
        pipeline.progress(iterator)
    if rank == culprit:
        model.module.offset.add_(1)
    began = time.monotonic()
    told = rf"a change of 'offset' before the forward of batch 2.* gives other inputs on rank {culprit}, and was not seen on"
    with pytest.raises(RuntimeError, match=f"rank {culprit} .*{told}"):
        for _ in range(2):
            pipeline.progress(iterator)
    with pytest.raises(RuntimeError, match=f"cannot be used again: .*{told}"):
        pipeline.progress(iterator)
    assert time.monotonic() - began < AT_ONCE
    await_all(rank, world_size)


@pytest.mark.parametrize("broadcasts", [False, True])
@pytest.mark.parametrize("culprit", [0, 1])
@only_on_cpu("gives up groups of farandole's on CPU")
def test_a_change_on_one_rank_is_told_to_all(culprit, broadcasts):
    run_ranks(change_alone, 2, "farandole", timeout=60, culprit=culprit, broadcasts=broadcasts)


def change_unseen(rank: int, world_size: int) -> None:
    """What DDP overwrites in the forward, and torch has not counted: the ranks have had different ones ahead."""
    model, optimizer = wrapped()
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
    iterator = iter(make_batches(1, 12))
    for _ in range(4):
        pipeline.progress(iterator)
    if rank == 1:
        model.module.offset.data.add_(1)
    # Of torch 2.11's DDP the writes count, so that values are looked at before the forward.
    told = r"'offset', with which inputs of .* were computed .* had other values on this rank|'offset' .* other inputs on rank 1"
    with pytest.raises(RuntimeError, match=told):
        for _ in range(2):
            pipeline.progress(iterator)
        if rank == 0:  # which is told when it waits, or has failed as well
            pipeline.progress(iterator)
    await_all(rank, world_size)


@only_on_cpu("looks at values in each forward on CPU")
def test_a_buffer_that_differs_between_ranks_and_ddp_overwrites_is_an_error():
    run_ranks(change_unseen, 2, "farandole", timeout=60)


def change_in_forward(rank: int, world_size: int) -> None:
    """Before the model reads it."""
    model, optimizer = made(Shifted())
    model.eval()  # no backward, in which the first to fail would leave the others

    def forward(batch: Batch) -> Any:
        if rank >= 0 and len(outputs) == 2:
            model.module.offset.add_(1)
        return model(batch)

    outputs: list[Any] = []
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, custom_model_fwd=forward, strict=True)
    iterator = iter(make_batches(1, 6))
    for _ in range(2):
        outputs.append(pipeline.progress(iterator))
    with pytest.raises(RuntimeError, match="its forward changes 'offset', with which they are computed"):
        pipeline.progress(iterator)


def test_a_change_in_the_forward_is_named():
    run_ranks(change_in_forward, 2, "farandole", timeout=60)
