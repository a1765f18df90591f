"""Inputs of sharded modules as parts of the batch, from one forward that was watched."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from input_models import Batch, Jagged, Sharded, Untraceable, same, watched
from torch import nn

from farandole.sparse._input_hooks import RecordedInputs, record_inputs
from farandole.sparse._sharded import is_sharded
from support.devices import only_on_cpu

pytestmark = only_on_cpu("inputs are found without a device")


class Net(nn.Module):
    """Its forward is given, and depends on values, so that torch.fx cannot trace it."""

    def __init__(self, forward: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.a = Sharded()
        self.b = Sharded()
        self.dense = Untraceable()
        self._forward = forward

    def forward(self, batch: Any) -> Any:
        return self._forward(self, batch)


def recorded(forward: Callable[[Any, Any], Any], batch: Any) -> RecordedInputs:
    net = Net(forward)
    with record_inputs(net, is_sharded, batch) as inputs:
        net(batch)
    assert not net.a._forward_pre_hooks and not net.b._forward_pre_hooks
    return inputs


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass(slots=True)
class Slotted:
    inner: Any = field(default=None)


class Plain:
    def __init__(self, **parts: Any) -> None:
        self.__dict__.update(parts)


def random_batch(seed: int, number: int) -> tuple[Any, list[tuple[Any, ...]]]:
    """A nest with tensors and jagged ones, and the ways to them: the same ways for all numbers."""
    rng = random.Random(seed)
    values = torch.Generator().manual_seed(1000 * seed + number)
    ways: list[tuple[Any, ...]] = []

    def make(depth: int, way: tuple[Any, ...]) -> Any:
        kind = rng.randrange(7 if depth < 6 else 2)
        if depth == 0:
            kind = 2 + rng.randrange(5)
        if kind < 2:
            ways.append(way)
            leaf = torch.randn(3, generator=values)
            return Jagged(["k"], leaf) if kind else leaf
        first, second = [("item", 0), ("item", 1)] if kind < 4 else [("attr", "left"), ("attr", "right")]
        if kind == 2:
            first, second = ("item", "x"), ("item", 7)
        if kind == 6:
            return Slotted(make(depth + 1, (*way, ("attr", "inner"))))
        parts = make(depth + 1, (*way, first)), make(depth + 1, (*way, second))
        if kind == 2:
            return {"x": parts[0], 7: parts[1]}
        return {3: list, 4: lambda p: Pair(*p), 5: lambda p: Plain(left=p[0], right=p[1])}[kind](parts)

    return make(0, ()), ways


def go(batch: Any, way: tuple[Any, ...]) -> Any:
    for kind, key in way:
        batch = batch[key] if kind == "item" else getattr(batch, key)
    return batch


@pytest.mark.parametrize("seed", range(60))
def test_parts_of_a_batch_are_found_wherever_they_are(seed: int) -> None:
    first, ways = random_batch(seed, 0)
    rng = random.Random(seed)
    a, b, c = (rng.choice(ways) for _ in range(3))

    def forward(net: Net, batch: Any) -> torch.Tensor:
        nest = [go(batch, b), (None, {"k": go(batch, c), "n": 3})]
        return net.dense(net.b(go(batch, a), nest, mode="sum", weights=go(batch, a))[:1].expand(4)) + net.a(
            go(batch, c)
        )

    inputs = recorded(forward, first)
    assert inputs.names == ("b", "a"), f"seed {seed} {first} {list(map(str, inputs.verdicts))}"
    assert [str(verdict) for verdict in inputs.verdicts] == ["a: pipelined", "b: pipelined"]
    assert inputs.post_processing == ()
    for number in (1, 2):
        batch, _ = random_batch(seed, number)
        net = Net(forward)
        with watched(net, inputs.names) as expected:
            net(batch)
        for name, call in zip(inputs.names, inputs(batch)):
            assert same([call], expected[name]), f"seed {seed} {name}"


def write(batch: Batch) -> Batch:
    batch.ids.add_(1)
    return batch


def write_hidden(batch: Batch) -> Batch:
    batch.jagged.values().add_(1)
    return batch


def append(batch: Batch) -> Batch:
    batch.pair.append(batch.ids)
    return batch


def assign(batch: Batch) -> Batch:
    batch.ids = batch.ids + 1
    return batch


REFUSALS: dict[str, tuple[Callable[[Any, Batch], Any], str]] = {
    "computed": (lambda net, batch: net.a(batch.ids * 2), "its input 0 is no part of the batch: computed in forward"),
    "computed in a nest": (
        lambda net, batch: net.a(3, x=["y", {"k": batch.ids + 1}]),
        "its input x[1]['k'] is no part",
    ),
    "inside of a jagged": (lambda net, batch: net.a(batch.jagged.values() + 0), "its input 0 is no part"),
    "output of a sharded module": (lambda net, batch: net.a(batch.ids, net.b(batch.ids)), "its input 1 is no part"),
    "written": (lambda net, batch: net.a(write(batch).ids), "batch.ids, is changed in forward, in place"),
    "written inside": (lambda net, batch: net.a([write_hidden(batch).jagged]), "batch.jagged, is changed in forward"),
    "written, and given in a whole": (lambda net, batch: net.a(write(batch)), "its input 0, batch, is changed"),
    "appended": (lambda net, batch: net.a(append(batch).pair), "batch.pair, is changed"),
    "assigned": (lambda net, batch: net.a(assign(batch).ids), "its input 0 is no part"),
    "assigned, and given in a whole": (lambda net, batch: net.a(assign(batch)), "batch, is changed"),
    "twice": (lambda net, batch: net.a(batch.ids) + net.a(batch.pair[0]), "calls it 2 times"),
    "twice, and computed": (lambda net, batch: net.a(batch.ids) + net.a(batch.ids + 1), "calls it 2 times"),
    "never": (lambda net, batch: batch.ids, "never calls it"),
    "without inputs": (lambda net, batch: net.a(), "without inputs"),
    "a constant, or not": (lambda net, batch: net.a(batch.ids, batch.seed), "is 7, which may come from batch.seed"),
    "None, or not": (lambda net, batch: net.a(batch.ids, x=None), "x is None, which may come from batch.nothing"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_no_part_of_the_batch_is_refused(case: str) -> None:
    forward, reason = REFUSALS[case]
    batch = Batch(7)
    inputs = recorded(forward, batch)
    verdict = next(verdict for verdict in inputs.verdicts if verdict.module == "a")
    assert not verdict.pipelined and reason in verdict.reason and verdict.remedy in str(verdict), verdict
    assert "a" not in inputs.names and len(inputs(Batch(8))) == len(inputs.names)


def test_what_is_in_two_places_is_refused() -> None:
    batch = Batch()
    batch.pair[0] = batch.ids
    inputs = recorded(lambda net, batch: net.a(batch.ids) + net.b(batch.pair[1]), batch)
    assert inputs.names == ("b",)
    assert "in two places of the batch: batch.ids and batch.pair[0]" in inputs.verdicts[0].reason


def test_what_is_read_lazily_by_an_opaque_object_is_no_change() -> None:
    class Lazy:
        __module__ = "torchrec.sparse"

        def __init__(self) -> None:
            self.values = torch.ones(3)

    def read(batch: dict[str, Any]) -> dict[str, Any]:
        batch["lazy"].offsets = torch.ones(3)
        return batch

    inputs = recorded(lambda net, batch: net.a(read(batch)["lazy"]) + net.b(batch["lazy"].values), {"lazy": Lazy()})
    assert inputs.names == ("a",)  # what is inside might come and go


def test_a_part_of_another_kind_than_recorded_is_told() -> None:
    inputs = recorded(lambda net, batch: net.a(batch.pair[1]), Batch())
    other = Batch()
    other.pair[1] = None  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"batch\.pair\[1\] is NoneType in this batch, and was Tensor"):
        inputs(other)


def test_a_batch_that_holds_itself_and_empty_tuples_do_no_harm() -> None:
    batch = Plain(x=torch.ones(3), empty=(), also=())
    batch.me = batch
    inputs = recorded(lambda net, batch: net.a(batch.x, (), []) + net.b(batch), batch)
    assert "two places of the batch: batch and batch.me" in inputs.verdicts[1].reason
    [((x, *empty), _)] = inputs(Plain(x=2 * torch.ones(3)))
    assert x.sum() == 6 and empty == [(), []]


def test_hooks_are_gone_when_forward_fails() -> None:
    net = Net(lambda net, batch: net.a(batch.ids) / None)
    with pytest.raises(TypeError), record_inputs(net, is_sharded, Batch()) as inputs:
        net(Batch())
    assert not net.a._forward_pre_hooks and inputs.names == () == inputs.verdicts


def test_the_whole_batch_may_be_the_input_but_not_the_whole_model_the_module() -> None:
    batch = torch.ones(3)
    inputs = recorded(lambda net, batch: net.a(batch), batch)
    assert inputs(2 * batch)[0][0][0].sum() == 6
    with record_inputs(Sharded(), is_sharded, batch) as inputs:
        pass
    assert "the whole model" in inputs.verdicts[0].reason and inputs(batch) == []
