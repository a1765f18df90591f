"""A rank that fails where the others wait for it is told to them at once, by name; random ranks, stages and batches."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from farandole.sparse import TrainPipelineSparseDist
from support.devices import only_on_cpu
from support.processes import await_all, run_ranks
from support.recommenders import (
    Loader,
    Request,
    ShardedTables,
    Trouble,
    assert_same,
    drain_with_errors,
    made,
    make_batches,
    plain_loop,
)

pytestmark = only_on_cpu("agree_on_inputs is for pipelines on CPU")

CPU = torch.device("cpu")
AT_ONCE = 8.0  # seconds, on a machine that does other things; groups time out after 60

# What other ranks are told, and whether only that batch is lost.
STAGES = {
    "load": (r"load of batch {batch}: Trouble: cannot read", True),
    "input_dist": (r"input_dist of tables\.0 of batch {batch}: Trouble: input_dist", False),
    "data": (r"the wait for its splits of tables\.0 of batch {batch}: Trouble: data", False),
    "arrival": (r"the wait for its inputs of batch {batch}: Trouble: arrival", True),
}


def failing(ats: Iterable[int], text: str) -> Callable[..., None]:
    """Raises in calls of these numbers."""
    calls = iter(range(1000))

    def call(*_: int) -> None:
        if next(calls) in ats:
            raise Trouble(text)

    return call


def fail_on_one(rank: int, world_size: int, seed: int, stage: str, threads: bool | None) -> None:
    pick = random.Random(seed)
    culprit, number = pick.randrange(world_size), pick.randrange(6)
    print(f"seed {seed}: {stage} of batch {number} fails on rank {culprit}, threads {threads}")
    (model, optimizer), (plain, plain_optimizer) = made(seed), made(seed)
    pipeline = TrainPipelineSparseDist(
        model, optimizer, CPU, load_on_thread=threads, dist_on_thread=threads, agree_on_inputs=True
    )
    batches = make_batches(seed, 6)
    fails = {number} if rank == culprit and stage == "load" else set()
    if rank == culprit and stage != "load":
        table = model.module.tables[0]
        name = {"input_dist": "before_dist", "data": "before_data", "arrival": "before_arrival"}[stage]
        setattr(table, name, failing({number}, stage))
    loader = Loader(list(batches), fails)
    seen: list[Any] = []
    began = time.monotonic()
    while len(seen) <= number:
        try:
            seen.append(pipeline.progress(loader))
        except (Trouble, RuntimeError) as error:
            seen.append(error)
    assert time.monotonic() - began < AT_ONCE
    told, goes_on = STAGES[stage]
    error = seen[number]
    if rank == culprit:
        assert isinstance(error, Trouble)
    else:
        assert isinstance(error, RuntimeError)
        expected = rf"^batch {number} is skipped on all ranks.*\nrank {culprit}, {told.format(batch=number)}"
        assert re.search(expected, str(error)), error
    if goes_on:
        del seen[number], batches[number]
        seen += drain_with_errors(pipeline, loader)
        expected_outputs = plain_loop(plain, plain_optimizer, batches)
        assert len(seen) == len(batches) and all(map(torch.equal, seen, expected_outputs))
        assert_same(model, plain)
        return
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"cannot be used again.*out of step.*rank {culprit}, .*{stage}"):
            pipeline.progress(loader)
    await_all(rank, world_size)


class Waiting(ShardedTables):
    """Its input_dist waits for other ranks before it returns."""

    def input_dist(self, context: dict[str, Any], ids: torch.Tensor, offset: int = 0) -> Request:
        sent = super().input_dist(context, ids, offset).wait()
        return Request(lambda: sent)


def wait_inside(rank: int, world_size: int, seed: int, threads: bool) -> None:
    pick = random.Random(seed)
    culprit, number = pick.randrange(world_size), pick.randrange(4)
    print(f"seed {seed}: batch {number} fails on rank {culprit}, threads {threads}")
    model, optimizer = made(seed)
    model.module.tables[0].__class__ = Waiting
    pipeline = TrainPipelineSparseDist(
        model, optimizer, CPU, load_on_thread=threads, dist_on_thread=threads, agree_on_inputs=True
    )
    if rank == culprit:
        model.module.tables[0].before_dist = failing({number}, "inside")
    batches = iter(make_batches(seed, 6))
    for _ in range(number):
        pipeline.progress(batches)
    began = time.monotonic()
    expected = (
        "^inside$" if rank == culprit else rf"batch {number} is .*\nrank {culprit}, input_dist of tables\.0 of batch"
    )
    with pytest.raises((Trouble, RuntimeError), match=expected):
        pipeline.progress(batches)
    assert time.monotonic() - began < AT_ONCE
    with pytest.raises(RuntimeError, match=rf"cannot be used again.*out of step.*rank {culprit}, .*inside"):
        pipeline.progress(batches)
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
@pytest.mark.parametrize("threads", [False, True])
def test_who_waits_inside_of_a_module_is_woken(threads, backend):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_ranks(wait_inside, 3, backend, timeout=30, seed=seed, threads=threads)


@pytest.mark.sample(6)
@pytest.mark.parametrize("backend", ["farandole", "gloo"])
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("stage", STAGES)
def test_the_others_hear_at_once_which_rank_failed_and_where(stage, threads, backend):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_ranks(fail_on_one, 3, backend, seed=seed, stage=stage, threads=threads)


def test_agreement_on_inputs_is_for_pipelines_on_cpu():
    model = torch.nn.Linear(1, 1)
    with pytest.raises(ValueError, match="agree_on_inputs=True with device cuda: expected False"):
        TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters()), "cuda", agree_on_inputs=True)
