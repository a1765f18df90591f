"""What crosses from one stream to another, on an accelerator that is not there: waited for, and told to the allocator.

The pipelines run as on CUDA, without one rank more: which stages are lazy, which streams are entered, what is handed
over. That CUDA does what is asked of it, only a GPU could tell.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from farandole.sparse import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    _base,
    _streams,
)
from farandole.sparse._streams import Streams
from support.devices import only_on_cpu
from support.recommenders import Request
from support.streams import Device, OnHost, Tracked

pytestmark = only_on_cpu("plays an accelerator; tests/python/gpu/test_sparse_pipeline has the GPU")

CUDA = torch.device("cuda")
WIDTH = 4


@dataclass
class Batch:
    ids: Any
    more: dict[str, Any]


class Shift(nn.Module):
    """Post-processing: runs ahead, on the stream of input_dists."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.ones(1, dtype=torch.int64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids + self.by


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, WIDTH))

    def create_context(self) -> dict[str, Any]:
        return {}

    def input_dist(self, context: dict[str, Any], ids: torch.Tensor) -> Request:
        context["lengths"] = (ids > 0).sum()
        splits = ids % 7

        def send() -> Request:
            sent = splits + 1

            return Request(lambda: sent * 2 - ids)

        return Request(send)

    def compute_and_output_dist(self, context: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids % 20] * context["lengths"]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        context = self.create_context()
        return self.compute_and_output_dist(context, self.input_dist(context, ids).wait().wait())


class Cached(Tables):
    """The rows of its cache are made on the stream that it is prefetched on."""

    def prefetch(self, ctx: dict[str, Any], dist_input: torch.Tensor, forward_stream: Any) -> None:
        ctx["rows"] = dist_input % 20
        ctx["rows"].record_stream(forward_stream)
        ctx["lengths"] = ctx["lengths"] + 0
        ctx["lengths"].record_stream(forward_stream)
        dist_input.record_stream(forward_stream)

    def compute_and_output_dist(self, context: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
        rows = context["rows"] if "rows" in context else ids % 20
        return self.table[rows] * context["lengths"] + (ids * 0).unsqueeze(1)


class Net(nn.Module):
    def __init__(self, tables: type[Tables]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shift = Shift()
        self.tables = tables()
        self.others = tables()
        self.dense = nn.Linear(WIDTH, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        shifted = self.shift(batch.ids)
        rows = self.tables(shifted) + self.others(batch.more["ids"]) + shifted.unsqueeze(1)
        scores = self.dense(rows).squeeze(1) + batch.more["bias"]
        return scores.square(), scores.detach()


KINDS = {
    "base": TrainPipelineBase,
    "sparse": TrainPipelineSparseDist,
    "eval": EvalPipelineSparseDist,
    "prefetch": PrefetchTrainPipelineSparseDist,
}


def batches(device: Device, number: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(number):
        ids, others = (torch.randint(0, 20, (5,), generator=generator) for _ in range(2))
        bias = OnHost(device, torch.randn(5, generator=generator))
        yield Batch(OnHost(device, ids), {"ids": OnHost(device, others), "bias": bias})


def plain(number: int, trains: bool) -> list[torch.Tensor]:
    model, device, outputs = Net(Tables), Device(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches(device, number):
        moved = Batch(batch.ids.to(CUDA), {name: part.to(CUDA) for name, part in batch.more.items()})
        optimizer.zero_grad()
        losses, output = model(moved)
        if trains:
            losses.sum().backward()
            optimizer.step()
        outputs.append(output.as_subclass(torch.Tensor))
    return outputs


def run(kind: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Device:
    """Ten batches, among them two in eval mode, whose batches were ahead in training mode."""
    device = Device()
    monkeypatch.setattr(_base, "Streams", functools.partial(Streams, module=device))
    model = Net(Cached if kind == "prefetch" else Tables)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    pipeline: Any = KINDS[kind](model, optimizer, CUDA, **options)
    source = batches(device, 10)
    outputs = []
    for step in range(10):
        if kind == "prefetch":
            pipeline.prefetch_ahead = step not in (3, 4)
        model.train(step not in (4, 5))
        outputs.append(pipeline.progress(source).as_subclass(torch.Tensor))
    with pytest.raises(StopIteration):
        pipeline.progress(source)
    if kind == "eval":
        assert all(map(torch.equal, outputs, plain(10, trains=False)))
    else:
        expected = plain(10, trains=True)
        assert all(map(torch.equal, outputs[:4], expected[:4]))
    return device


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("on_thread", [False, True])
def test_what_crosses_streams_is_waited_for_and_recorded(kind, on_thread, monkeypatch):
    device = run(kind, monkeypatch, load_on_thread=on_thread)
    assert device.unwaited == []
    assert device.unrecorded() == []


# Each place where something is handed over, by the function that does.
PLACES = {
    "base": ["_begin_forward"],
    "sparse": ["_begin_forward", "_start_dist", "_running", "_complete"],
    "prefetch": ["_begin_forward", "_start_dist", "_running", "_complete", "_prefetch_rows"],
}


def is_needed(kind: str, place: str, what: str) -> bool:
    """All but one wait: a forward waits for the stream of input_dists, which has waited for that of copies."""
    return (what, place) != ("wait", "_begin_forward") or kind == "base"


@pytest.mark.parametrize(
    ("kind", "place", "what"),
    [
        (kind, place, what)
        for kind, places in PLACES.items()
        for place in places
        for what in ("wait", "record")
        if is_needed(kind, place, what)
    ],
)
def test_without_one_of_these_it_is_noticed(kind, place, what, monkeypatch):
    original = Streams.hand_over

    def hand_over(self: Streams, source: Any, *values: Any) -> None:
        if sys._getframe(1).f_code.co_name != place:
            original(self, source, *values)
        elif what == "wait":
            for value in values:
                _streams.record_stream(value, self.current())
        else:
            original(self, source)

    monkeypatch.setattr(Streams, "hand_over", hand_over)
    device = run(kind, monkeypatch)
    assert device.unwaited if what == "wait" else device.unrecorded()


def test_tensors_know_their_streams():
    device = Device()
    other = device.Stream(CUDA, 0)
    made = device.tensor(torch.ones(3))
    view = made[1:]
    assert isinstance(view, Tracked) and view.memory is made.memory
    with device.stream(other):
        _ = view + 1
    assert len(device.unwaited) == 1 and len(device.unrecorded()) == 1
    view.record_stream(other)
    assert device.unrecorded() == []
    with device.stream(other):
        other.wait_stream(device.default)
        _ = view + 1
        made.add_(1)
    assert len(device.unwaited) == 1
    _ = view.sum(), made.sum()  # what the other stream has written since
    assert len(device.unwaited) == 2
