"""Iterators that write to a batch after they gave it: an error of that batch, and none where memory is its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_prefetch import CachedRecommender

from farandole.sparse import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from farandole.sparse._given import _EVERY, _FIRST_LOOKS, _FIRST_SAMPLES
from support.devices import DEVICE, only_on_cpu
from support.processes import run_ranks
from support.recommenders import Batch, Mean, Recommender, drain, drain_with_errors, made, make_batches, plain_loop

pytestmark = only_on_cpu("a copy to a GPU is memory of its own")

KINDS: dict[str, Any] = {
    "base": TrainPipelineBase,
    "sparse": TrainPipelineSparseDist,
    "prefetch": PrefetchTrainPipelineSparseDist,
    "eval": EvalPipelineSparseDist,
}
TOLD = "the iterator has written to batch{} after it gave that, .* expected memory of its own for each batch"


class Sum(Mean):
    """Begins after what a thread loads beside it."""

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        time.sleep(0.02)
        values = batch["values"] * batch.get("scale", 1.0)
        return (self.weight * values).reshape(-1), values.clone()


def seen(batches: Iterator[Any], model: Any = None, **options: Any) -> list[Any]:
    """Outputs and errors."""
    model = Sum() if model is None else model
    pipeline = TrainPipelineBase(model, torch.optim.SGD(model.parameters(), lr=0.1), "cpu", **options)
    return drain_with_errors(pipeline, batches)


def values(number: int = 6, *sizes: int) -> list[torch.Tensor]:
    return [torch.full(sizes or (3,), 1.0 + i) for i in range(number)]


def expect(found: list[Any], expected: list[Any], where: str = r"\['values'\]", may_be_late: bool = False) -> None:
    """A batch that was written to, where that is None; ``may_be_late``: by a thread, maybe after the forward had it all."""
    assert len(found) == len(expected)
    assert None not in expected or any(isinstance(one, RuntimeError) for one in found)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if may_be_late and isinstance(one, torch.Tensor):
            other = values()[index]
        if other is not None:
            assert isinstance(one, torch.Tensor) and torch.equal(one, other), (index, one)
            continue
        with pytest.raises(RuntimeError, match=f"batch {index}: {TOLD.format(where)}"):
            raise one


def refilled(buffer: torch.Tensor) -> Iterator[Any]:
    for value in values():
        buffer[: len(value)].copy_(value)
        yield {"values": buffer[: len(value)]}


@pytest.mark.parametrize("on_thread", [False, True])
@pytest.mark.parametrize("size", [3, 8])
def test_a_buffer_that_is_filled_again(on_thread, size):
    found = seen(refilled(torch.empty(size)), load_on_thread=on_thread)
    expect(found, [*[None] * 5, values()[5]], may_be_late=on_thread)


@pytest.mark.parametrize("on_thread", [False, True])
def test_a_buffer_of_inference(on_thread):
    with torch.inference_mode():
        found = seen(refilled(torch.empty(3)), Sum().eval(), load_on_thread=on_thread)
    expect(found, [*[None] * 5, values()[5]], may_be_late=on_thread)


def array_refilled(makes_anew: bool) -> Iterator[Any]:
    array = np.empty(3, dtype=np.float32)
    tensor = torch.from_numpy(array)
    for value in values():
        array[:] = value.numpy()
        yield {"values": torch.from_numpy(array) if makes_anew else tensor}


@pytest.mark.parametrize("makes_anew", [False, True])
@pytest.mark.parametrize("on_thread", [False, True])
def test_an_array_of_numpy_that_is_filled_again(makes_anew, on_thread):
    found = seen(array_refilled(makes_anew), load_on_thread=on_thread)
    expect(found, [*[None] * 5, values()[5]], may_be_late=on_thread)


def test_an_array_that_is_constant_for_a_while():
    array, number = np.ones(3, dtype=np.float32), _FIRST_SAMPLES + 2 * _EVERY

    def batches() -> Iterator[Any]:
        for index in range(number):
            if index >= _FIRST_SAMPLES + 2:
                array[:] = index
            yield {"values": torch.from_numpy(array)}

    errors = [index for index, each in enumerate(seen(batches())) if isinstance(each, RuntimeError)]
    assert errors == list(range(errors[0], number - 1)) and errors[0] <= _FIRST_SAMPLES + _EVERY


def test_a_buffer_that_is_filled_again_later_on():
    buffer, first = torch.ones(3), _FIRST_LOOKS + 3
    number = first + 2 * _EVERY

    def batches() -> Iterator[Any]:
        for index in range(number):
            yield {"values": buffer if index >= first else torch.ones(3)}
            if index >= first:
                buffer.fill_(index)

    errors = [index for index, each in enumerate(seen(batches())) if isinstance(each, RuntimeError)]
    assert errors == list(range(errors[0], number)) and first <= errors[0] <= first + _EVERY


def test_writes_after_a_batch_was_given():
    def batches() -> Iterator[Any]:
        for value in values():
            yield {"values": value}
            value.zero_()

    expect(seen(batches()), [None] * 6)


class Box:
    """A batch whose ``to`` is no copy."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Box:
        return self

    def record_stream(self, stream: Any) -> None:
        pass


def test_an_object_that_is_filled_again():
    class Boxed(Sum):
        def forward(self, batch: Any) -> Any:
            return super().forward(vars(batch))

    def batches() -> Iterator[Any]:
        box = Box()
        for value in values():
            box.values = value
            yield box

    expect(seen(batches(), Boxed()), [*[None] * 5, values()[5]], r"\.values")
    boxes = [Box()] * 4
    boxes[0].values = torch.ones(3)
    expect(seen(iter(boxes), Boxed()), [torch.ones(3)] * 4)


def test_containers_may_be_filled_again():
    def batches() -> Iterator[Any]:
        batch: dict[str, Any] = {}
        for value in values():
            batch["values"] = value
            yield batch

    expect(seen(batches()), values())


@pytest.mark.parametrize("on_thread", [False, True])
def test_parts_of_one_tensor_may_be_filled_in_turn(on_thread):
    slots, arrays = torch.empty(4, 3), np.empty((4, 3), dtype=np.float32)

    def batches(of_numpy: bool) -> Iterator[Any]:
        for index, value in enumerate(values(9)):
            if of_numpy:
                arrays[index % 4] = value.numpy()
            else:
                slots[index % 4] = value
            yield {"values": torch.from_numpy(arrays[index % 4]) if of_numpy else slots[index % 4].detach()}

    for of_numpy in (False, True):
        expect(seen(batches(of_numpy), load_on_thread=on_thread), values(9))


@pytest.mark.parametrize("on_thread", [False, True])
def test_constants_may_be_given_again(on_thread):
    scale, array = torch.full((3,), 2.0), np.full(3, 2.0, dtype=np.float32)
    for constant in (lambda: scale, lambda: torch.from_numpy(array)):
        batches = ({"values": value, "scale": constant()} for value in values())
        expect(seen(batches, load_on_thread=on_thread), [2 * value for value in values()])


@pytest.mark.parametrize("on_thread", [False, True])
def test_a_forward_may_write_to_its_batch(on_thread):
    class InPlace(Sum):
        def forward(self, batch: Any) -> Any:
            for _ in range(20):
                batch["values"].mul_(2).mul_(0.5)
                time.sleep(0.001)
            return super().forward({"values": batch["values"].mul_(2)})

    def batches() -> Iterator[Any]:
        for value in values():
            time.sleep(0.01)
            yield {"values": value}

    expect(seen(batches(), InPlace(), load_on_thread=on_thread), [2 * value for value in values()])
    same = {"values": torch.ones(3)}  # one batch each time
    expect(seen(iter([same] * 4), InPlace()), [torch.full((3,), 2.0**i) for i in range(1, 5)])


def refill_ids(rank: int, world_size: int, kind: str, options: dict[str, Any]) -> None:
    model, optimizer = made((CachedRecommender if kind == "prefetch" else Recommender)(1))
    pipeline = KINDS[kind](model, optimizer, DEVICE, **options)
    plain, plain_optimizer = made(Recommender(1))
    batches = make_batches(1, 6, (4, 5))
    ids = torch.empty_like(batches[0].ids)

    def refilled() -> Iterator[Batch]:
        for batch in batches:
            yield Batch(ids.copy_(batch.ids), batch.dense, batch.labels)

    found = drain_with_errors(pipeline, refilled())
    with contextlib.nullcontext() if kind != "eval" else torch.no_grad():
        expected = plain_loop(plain, plain_optimizer, batches[5:]) if kind != "eval" else [plain(batches[5])[1]]
    expect(found, [*[None] * 5, *expected], r"\.ids")
    if kind == "prefetch":
        pipeline.drop_prefetched()
    given = make_batches(2, 4)
    assert len(drain(pipeline, iter(given))) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_ids_that_are_filled_again(kind):
    run_ranks(refill_ids, 2, "farandole", kind=kind, options={})


@pytest.mark.parametrize(
    "options",
    [{"tracing": "hooks"}, {"dist_on_thread": True, "load_on_thread": True}],
    ids=["hooks", "threads"],
)
def test_ids_that_are_filled_again_by_other_ways(options):
    run_ranks(refill_ids, 2, "farandole", kind="sparse", options=options)


def refill_on_one(rank: int, world_size: int) -> None:
    """With a word of all ranks before the forward, all of them skip what was written to on one."""
    (model, optimizer), (plain, plain_optimizer) = made(), made()
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, agree_on_inputs=True)
    batches = make_batches(1, 6, (4, 5))

    def given() -> Iterator[Batch]:
        for index, batch in enumerate(batches):
            if rank == 1 and index == 3:
                batches[2].dense.zero_()
            yield batch

    found = drain_with_errors(pipeline, given())
    told = str(found.pop(2))
    assert "batch 2" in told and "the iterator has written to batch.dense" in told
    expected = plain_loop(plain, plain_optimizer, [*batches[:2], *batches[3:]])
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)


def test_all_ranks_skip_it_where_they_agree_on_inputs():
    run_ranks(refill_on_one, 2, "farandole")
