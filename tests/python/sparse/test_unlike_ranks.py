"""Ranks whose forwards are not the same: what one of them cannot pipeline, none does."""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from farandole.sparse import CannotTrace, EvalPipelineSparseDist, TrainPipelineSparseDist
from farandole.sparse._joint_steps import JointSteps
from support.devices import DEVICE, only_on_cpu
from support.processes import await_all, run_ranks
from support.recommenders import Batch, Recommender, assert_same, drain, made, make_batches, plain_loop

BACKENDS = ["farandole", "gloo"]
TIMEOUT = 30
AT_ONCE = 5.0  # seconds, on a machine that does other things
LONG = 2.0


class Logged(Recommender):
    """One rank asks for a value."""

    def __init__(self, rank: int = 0) -> None:
        super().__init__(1, tables=2)
        self.is_logged = dist.get_rank() == rank

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        losses, scores = super().forward(batch)
        if self.is_logged:
            float(losses.sum())
        return losses, scores


class Late(Recommender):
    """Each rank makes the ids of some tables with a parameter: rank 0 those of the tables ``of[0]``."""

    def __init__(self, *of: tuple[int, ...], tables: int = 3) -> None:
        super().__init__(1, tables)
        self.late = of[dist.get_rank()]

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        rows = []
        for index, table in enumerate(self.tables):
            ids = batch.ids + index
            if index in self.late:
                ids = ids + self.dense[0].weight.detach().abs().sum().long() * 0
            rows.append(table(ids))
        return self.score(torch.cat([*rows, batch.dense], 1), batch.labels)


@dataclass
class WithWorker(Batch):
    worker: int = 0


class Shifted(Recommender):
    """Its second table is called with a number."""

    def __init__(self) -> None:
        super().__init__(1, tables=2)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [self.tables[0](batch.ids), self.tables[1](batch.ids, offset=1)]
        return self.score(torch.cat([*rows, batch.dense], 1), batch.labels)


def with_workers(batches: list[Batch]) -> list[Batch]:
    return [WithWorker(batch.ids, batch.dense, batch.labels, dist.get_rank()) for batch in batches]


MODELS: dict[str, Callable[[], Recommender]] = {
    "logged": Logged,
    "one of three tables": lambda: Late((1,), ()),
    "another one on each rank": lambda: Late((2,), (0,)),
    "all of one rank": lambda: Late((), (0, 1, 2)),
    "by the data": Shifted,
}
_LATE = "not pipelined: on rank {}: its input depends on 'dense.0.weight', a parameter that is trained"
EXPLAINED = {
    "logged": ["tables.0: pipelined", "tables.1: pipelined", "by hooks, since rank 0: torch.fx cannot trace the model"],
    "one of three tables": ["tables.0: pipelined", f"tables.1: {_LATE.format(0)}", "tables.2: pipelined"],
    "another one on each rank": [
        f"tables.0: {_LATE.format(1)}",
        "tables.1: pipelined",
        f"tables.2: {_LATE.format(0)}",
    ],
    "all of one rank": [f"tables.{index}: {_LATE.format(1)}" for index in range(3)],
    "by the data": [
        "tables.0: pipelined",
        "tables.1: not pipelined: on rank 1: its input offset is 1, which may come from batch.worker",
    ],
}


def train(rank: int, world_size: int, case: str, threads: bool) -> None:
    (model, optimizer), (plain, plain_optimizer) = made(MODELS[case]()), made(MODELS[case]())
    batches = make_batches(1, 6)
    tracing = None
    if case == "by the data":
        batches, tracing = with_workers(batches), "hooks"
    options = {"load_on_thread": threads, "dist_on_thread": threads, "tracing": tracing}
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        outputs = drain(pipeline, iter(batches))
    lines = pipeline.explain().splitlines()
    assert len(lines) == len(EXPLAINED[case]), lines
    for line, expected in zip(lines, EXPLAINED[case], strict=True):
        assert line.startswith(expected), line
    said = "\n".join(str(each.message) for each in seen)
    assert len(re.findall(r"rank \d: ", said)) == sum(" rank " in line for line in lines), said
    expected = plain_loop(plain, plain_optimizer, batches)
    assert len(outputs) == 6 and all(map(torch.equal, outputs, expected))
    assert_same(model, plain)
    names = [line.split(":")[0] for line in lines if line.endswith(": pipelined")]
    assert pipeline._attachment is not None and list(pipeline._attachment.pipelined) == names


@pytest.mark.parametrize("case", MODELS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_one_rank_cannot_pipeline_none_does(backend, case):
    run_ranks(train, 2, backend, timeout=TIMEOUT, case=case, threads=False)


@pytest.mark.parametrize("case", ["logged", "one of three tables"])
def test_on_threads_no_rank_pipelines_what_another_cannot(case):
    run_ranks(train, 2, "farandole", timeout=TIMEOUT, case=case, threads=True)


def be_strict(rank: int, world_size: int, case: str) -> None:
    model, optimizer = made(MODELS[case]())
    batches = make_batches(1, 4)
    options: dict[str, Any] = {"strict": True}
    if case == "by the data":
        batches, options["tracing"] = with_workers(batches), "hooks"
    iterator = iter(batches)
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, **options)
    if case == "by the data":
        pipeline.progress(iterator)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"cannot be pipelined\ntables\.\d: not pipelined: on rank \d: "):
            pipeline.progress(iterator)


@pytest.mark.parametrize("case", ["one of three tables", "all of one rank", "by the data"])
def test_strict_refuses_on_all_ranks_what_one_of_them_cannot_pipeline(case):
    run_ranks(be_strict, 2, "farandole", timeout=TIMEOUT, case=case)


def be_strict_alone(rank: int, world_size: int) -> None:
    model, optimizer = made(MODELS["one of three tables"]())
    with pytest.raises(ValueError, match=r"tables\.1: not pipelined: on rank 0"):
        TrainPipelineSparseDist(model, optimizer, DEVICE, strict=rank == 1).explain()


def test_strict_on_one_rank_is_so_on_all():
    run_ranks(be_strict_alone, 2, "farandole", timeout=TIMEOUT)


def insist_on_fx(rank: int, world_size: int) -> None:
    model, optimizer = made(Logged(rank=1))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, tracing="fx")
    for _ in range(2):
        with pytest.raises(CannotTrace, match=r"float\(losses\.sum\(\)\)") as error:
            pipeline.progress(iter(make_batches(1, 4)))
        assert ("rank 1: torch.fx cannot trace" in str(error.value)) == (rank == 0)
    with pytest.raises(ValueError, match="tracing='hooks' on rank 0, None on rank 1: expected the same on all ranks"):
        TrainPipelineSparseDist(model, optimizer, DEVICE, tracing=None if rank else "hooks").explain()
    assert TrainPipelineSparseDist(model, optimizer, DEVICE, tracing="hooks").explain().endswith("will tell")


def test_where_fx_is_asked_for_all_ranks_raise():
    run_ranks(insist_on_fx, 2, "farandole", timeout=TIMEOUT)


def end_early(rank: int, world_size: int, first: tuple[int, int]) -> None:
    """So many batches of the first iterator, by rank; the ranks are unlike in the one after it, too."""
    (model, optimizer), (plain, plain_optimizer) = made(Logged()), made(Logged())
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    expected: list[torch.Tensor] = []
    outputs: list[torch.Tensor] = []
    for seed, numbers in enumerate([first, (4, 5)]):
        batches = make_batches(seed, numbers[rank])
        outputs += drain(pipeline, iter(batches))
        expected += plain_loop(plain, plain_optimizer, batches[: min(numbers)])
    assert len(outputs) == min(first) + 4 and all(map(torch.equal, outputs, expected))
    assert pipeline.explain().startswith("tables.0: pipelined\ntables.1: pipelined\nby hooks, since rank 0")
    assert_same(model, plain)


@pytest.mark.parametrize("first", [(0, 2), (2, 0), (1, 3), (3, 1), (0, 0)])
def test_ranks_agree_also_where_some_have_no_batch(first):
    run_ranks(end_early, 2, "farandole", timeout=TIMEOUT, first=first)


class Plain(torch.nn.Module):
    """Without any sharded module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones((), device=DEVICE))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.weight * batch.dense).sum(1), batch.labels


def attach_none(rank: int, world_size: int, culprit: int) -> None:
    sharded = Recommender(1)  # whose group all ranks make
    model: torch.nn.Module = Plain() if rank == culprit else sharded
    pipeline = TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), lr=0.1), DEVICE)
    began = time.monotonic()
    told = "Plain has no sharded module: expected torchrec's ShardedModule"
    for _ in range(2):
        if rank == culprit:
            with pytest.raises(ValueError, match=f"^{told}"):
                pipeline.explain()
        else:
            with pytest.raises(RuntimeError, match=f"cannot be attached\nrank {culprit}: ValueError: {told}"):
                pipeline.explain()
    assert time.monotonic() - began < AT_ONCE


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_without_sharded_modules_on_one_rank_is_told_to_all(backend, culprit):
    run_ranks(attach_none, 2, backend, timeout=TIMEOUT, culprit=culprit)


class Fails(Recommender):
    """In a forward, on one rank, where nothing of it is left to do that others take part in."""

    def score(self, features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if dist.get_rank() == 1:
            raise ValueError("a label is missing")
        return super().score(features, labels)


def fail_alone(rank: int, world_size: int) -> None:
    """Rank 0 comes to the agreement that follows the first forward; rank 1 does not."""
    model = Fails(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = EvalPipelineSparseDist(model, optimizer, DEVICE, tracing="hooks")
    iterator = iter(make_batches(1, 6))
    time.sleep(LONG)  # for twice of which who fails waits for the others
    if rank == 0:
        pipeline.progress(iterator)
    began = time.monotonic()
    with pytest.raises((RuntimeError, ValueError), match="a label is missing"):
        pipeline.progress(iterator)
    assert time.monotonic() - began < LONG
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"cannot be used again: rank 1 has failed .* a label is missing"):
            pipeline.progress(iterator)
    await_all(rank, world_size)


@only_on_cpu("where one rank tells the others that it has failed")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_rank_that_fails_alone_before_the_agreement_tells_the_others(backend):
    run_ranks(fail_alone, 2, backend, timeout=TIMEOUT)


def say_words(rank: int, world_size: int) -> None:
    joint = JointSteps(dist.group.WORLD, torch.device(DEVICE))
    assert joint.words("a test", "same") == dict.fromkeys(range(3), "same")
    for turn in range(3):
        assert joint.words("a test", f"word {rank if turn else 0}") == {
            other: f"word {other if turn else 0}" for other in range(3)
        }
    some = dist.new_group([1, 2])
    if rank:
        assert JointSteps(some, torch.device(DEVICE)).words("a test", f"\u00e9{rank}") == {1: "\u00e91", 2: "\u00e92"}


@only_on_cpu("where a rank's group is its own")
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_hear_what_the_others_say(backend):
    run_ranks(say_words, 3, backend, timeout=TIMEOUT)


def say_nothing(rank: int, world_size: int) -> None:
    assert JointSteps(None, torch.device(DEVICE)).words("a test", "alone") == {0: "alone"}


def test_a_rank_without_a_group_asks_nobody():
    run_ranks(say_nothing, 1, None)
