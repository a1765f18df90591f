"""Batches are taken on another thread where that is asked for, or where nothing can notice."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DataLoader, Dataset, DistributedSampler, IterableDataset

from farandole.sparse import TrainPipelineBase, TrainPipelineSparseDist
from farandole.sparse._load_place import only_waits
from support.devices import DEVICE, only_on_cpu
from support.processes import run_ranks
from support.recommenders import Batch, Mean, assert_same, drain, made, make_batches, plain_loop

STEPS = 40  # two warm, seven timed and seven more on a thread, where they are tried there
WAIT = 0.003


class Numbers(Dataset):
    def __init__(self, seconds: float = 0.0) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self._seconds)
        return torch.ones(2)


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.ones(4, 2))


class Odd:
    """A sampler of one's own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(1, 6, 2))


class Located:
    """A batch that notes where it is moved."""

    threads: ClassVar[list[int]] = []

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def to(self, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        self.threads.append(threading.get_ident())
        return self.values.to(device)

    def record_stream(self, stream: Any) -> None:
        pass


def located(parts: list[torch.Tensor]) -> Located:
    return Located(torch.stack(parts))


def waiting() -> Iterator[Located]:
    while True:
        time.sleep(WAIT)
        yield Located(torch.ones(1, 2))


def test_which_iterators_do_nothing_but_wait():
    workers: dict[str, Any] = {"num_workers": 1}
    numbers = Numbers()
    distributed: Any = DistributedSampler(numbers, num_replicas=2, rank=0)
    for loader, expected in [
        (DataLoader(numbers, **workers), True),
        (DataLoader(numbers, shuffle=True, batch_size=2, **workers), True),
        (DataLoader(numbers, batch_size=None, **workers), True),
        (DataLoader(numbers, sampler=distributed, **workers), True),
        (DataLoader(numbers, sampler=[1, 2], **workers), True),
        (DataLoader(Stream(), **workers), True),
        (DataLoader(numbers), False),
        (DataLoader(numbers, sampler=Odd(), **workers), False),
        (DataLoader(numbers, batch_sampler=BatchSampler(Odd(), 2, False), **workers), False),
        (DataLoader(numbers, batch_sampler=[[1, 2], [3]], **workers), True),
    ]:
        assert only_waits(iter(loader)) is expected, vars(loader)
    assert not only_waits(waiting()) and not only_waits(iter([1]))


@pytest.mark.parametrize(
    ("source", "load_on_thread", "is_elsewhere"),
    [
        (waiting, None, False),
        (waiting, False, False),
        (waiting, True, True),
        (lambda: iter(DataLoader(Numbers(WAIT), collate_fn=located)), None, False),
        (lambda: iter(DataLoader(Numbers(WAIT), num_workers=1, collate_fn=located)), None, True),
    ],
)
@only_on_cpu("measures waits beside a forward of no time")
def test_where_batches_are_taken(source, load_on_thread, is_elsewhere, monkeypatch):
    monkeypatch.setattr(Located, "threads", [])
    model = Mean()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = TrainPipelineBase(model, optimizer, DEVICE, load_on_thread=load_on_thread)
    batches = source()
    for _ in range(STEPS - 4):
        pipeline.progress(batches)
    assert (set(Located.threads) != {threading.get_ident()}) is is_elsewhere


def test_another_source_is_judged_anew(monkeypatch):
    model = Mean().to(DEVICE)
    pipeline = TrainPipelineBase(model, torch.optim.SGD(model.parameters(), lr=0.1), DEVICE)
    for source, expected in [(iter(DataLoader(Numbers(), num_workers=1)), True), (waiting(), False)]:
        pipeline.progress(source)
        assert pipeline._stages.may_load_beside is expected


def agree_in_loads(rank: int, world_size: int) -> None:
    """An iterator with a collective for each batch, over the group of the forward."""
    (model, optimizer), (plain, plain_optimizer) = made(2), made(2)

    def agreed(batches: list[Batch]) -> Iterator[Batch]:
        for batch in batches:
            if rank == 0:
                time.sleep(WAIT)
            has_one = torch.ones(1, device=DEVICE)
            dist.all_reduce(has_one, dist.ReduceOp.MIN)
            yield batch

    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    batches = make_batches(1, STEPS)
    outputs = drain(pipeline, agreed(batches))
    assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, batches)))
    assert_same(model, plain)


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_an_iterator_may_do_collectives(backend):
    run_ranks(agree_in_loads, 2, backend, timeout=30)


def test_an_error_on_the_pipelines_own_thread_says_how_to_leave_it():
    caller = threading.get_ident()

    def bound() -> Iterator[torch.Tensor]:
        while threading.get_ident() == caller:
            yield torch.ones(2)
        raise ValueError("belongs to another thread")

    model = Mean().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pipeline = TrainPipelineBase(model, optimizer, DEVICE, load_on_thread=True)
    batches = bound()
    with pytest.raises(ValueError, match="belongs to another thread") as raised:
        for _ in range(4):
            pipeline.progress(batches)
    notes = getattr(raised.value, "__notes__", None)
    assert notes is None or "load_on_thread=False" in notes[0]
