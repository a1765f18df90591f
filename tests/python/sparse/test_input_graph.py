"""Inputs of sharded modules, computed ahead of forward, are those of a forward."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from input_models import Batch, Jagged, Net, computed, last, same, watched
from torch.nn import functional

from farandole.sparse._input_graph import trace_inputs
from farandole.sparse._post_processing import PostProcessing
from farandole.sparse._sharded import is_sharded
from support.devices import only_on_cpu

pytestmark = only_on_cpu("inputs are found without a device")


@torch.no_grad()
def without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return x * 2


PIPELINED: dict[str, Callable[[Any, Batch], Any]] = {
    "the batch": lambda net, batch: net.a(batch.ids),
    "constants only": lambda net, batch: net.a(torch.ones(4), 3, None, "sum"),
    "all kinds of nests": lambda net, batch: net.a(
        [batch.ids, (None, {"k": batch.pair})], x=slice(0, 2), y=batch.ids[1 : batch.ids.size(0)], z=torch.float64
    ),
    "frozen module and parameter": lambda net, batch: net.a(net.frozen(batch.ids) + net.fixed + net.frozen.weight[0]),
    "buffer": lambda net, batch: net.a(batch.ids + net.offset),
    "new jagged": lambda net, batch: net.a(Jagged(batch.jagged.keys(), batch.ids * 2, weights=net.count(batch.ids))),
    "halves": lambda net, batch: net.a(batch.jagged.halves()[1], batch.jagged.halves()),
    "dropout that is off": lambda net, batch: net.a(functional.dropout(batch.ids, 0.5, training=False)),
    "random module": lambda net, batch: net.a(net.drop(batch.ids)) * net.drop(batch.pair[0]),
    "dense code that fx cannot trace": lambda net, batch: net.dense(net.a(batch.ids)) * net.dense(batch.pair[0]),
    "other parts written": lambda net, batch: (
        batch.table["a"].add_(1),
        batch.pair[0].mul_(2),
        net.a(batch.table["b"]),
    ),
    "a part of another item written": lambda net, batch: last(
        batch.table["a"][1:].add_(1), net.a(batch.table["b"] + 1)
    ),
    "other parts replaced": lambda net, batch: last(
        setattr(batch, "jagged", batch.jagged.halves()[1]),
        setattr(batch, "ids", net.scale(batch.ids)),
        batch.table.__setitem__("a", batch.ids * 2),
        net.a(batch.table["b"], batch.pair),
    ),
    "written later": lambda net, batch: (net.a(batch.ids), batch.ids.add_(1)),
    "dense values written": lambda net, batch: (net.scale(batch.ids).relu_(), net.a(batch.jagged)),
    "a copy written": lambda net, batch: ((batch.ids * 2).relu_(), net.a(batch.ids)),
    "looked at": lambda net, batch: last(
        str(batch.ids.max()),
        str(batch.ids.stride()),
        str(batch.ids.float().mean()),
        str(batch.jagged.values().sum().item()),
        str(batch.jagged.weights().tolist()),
        str(batch.jagged.keys()),
        net.a(batch.ids, batch.jagged),
    ),
    "stream recorded": lambda net, batch: (batch.ids.record_stream(None), net.a(batch.ids)),
    "without gradients": lambda net, batch: net.a(without_gradients(batch.ids)) + net.scale(batch.ids),
    "after a refused one": lambda net, batch: (net.b(net.scale(batch.ids)), net.a(batch.ids)),
    "same module twice": lambda net, batch: net.a(net.count(batch.ids), net.count(net.count(batch.pair[0]))),
}


@pytest.mark.parametrize("case", PIPELINED)
def test_inputs_from_the_batch_alone_are_those_of_a_forward(case: str) -> None:
    net = Net(PIPELINED[case])
    graph = trace_inputs(net, is_sharded)
    assert "a" in graph.names, "\n".join(map(str, graph.verdicts))
    plain = copy.deepcopy(net)
    torch.manual_seed(1)
    inputs = graph(Batch(1))
    torch.manual_seed(1)
    if case == "stream recorded":
        plain._forward = PIPELINED["the batch"]
    with watched(plain, ("a",)) as expected:
        plain(Batch(1))
    assert same([inputs[graph.names.index("a")]], expected["a"])


def test_state_of_post_processing_counts_each_batch_once() -> None:
    def forward(net: Net, batch: Batch) -> torch.Tensor:
        first = net.count(batch.ids)
        return net.a(net.count(batch.pair[0])) + net.scale(net.count(first))

    net = Net(forward)
    plain = copy.deepcopy(net)
    graph = trace_inputs(net, is_sharded)
    assert graph.names == ("a",) and graph.post_processing == ("count",)
    post = PostProcessing(net, graph.post_processing)
    ahead = [computed(graph, post, Batch(seed))[1] for seed in range(3)]
    for seed, results in enumerate(ahead):
        assert len(results["count"]) == 3  # calls of which no input depends, too
        with post.replaying(results):
            assert torch.equal(net(Batch(seed)), plain(Batch(seed)))
    assert net.count.count == plain.count.count == 9
    net(Batch(3))
    assert net.count.count == 12  # runs as ever where nothing is replayed
    with pytest.raises(RuntimeError, match="'count' more rarely"), post.replaying(ahead[0]):
        net.count(Batch().ids)
    with pytest.raises(RuntimeError, match="'count' more often"), post.replaying(ahead[0]):
        net(Batch())
        net(Batch())
    post.close()
    assert "forward" not in vars(net.count)


def test_a_thread_computes_inputs_of_later_batches_while_forward_runs() -> None:
    net = Net(lambda net, batch: net.a(net.count(batch.ids)) + net.dense(net.count(batch.pair[0])))
    plain = copy.deepcopy(net)
    graph = trace_inputs(net, is_sharded)
    post = PostProcessing(net, graph.post_processing)
    with ThreadPoolExecutor(1) as worker:
        ahead = [worker.submit(computed, graph, post, Batch(seed)) for seed in range(200)]
        for seed, waited in enumerate(ahead):
            with post.replaying(waited.result(timeout=60)[1]):
                assert torch.equal(net(Batch(seed)), plain(Batch(seed)))
    assert net.count.count == plain.count.count == 400


def test_buffers_are_read_when_inputs_are_computed() -> None:
    net = Net(lambda net, batch: net.a(net.offset + batch.ids))
    graph = trace_inputs(net, is_sharded)
    net.offset = torch.full((4,), 7.0)
    [((x,), _)] = graph(Batch(1))
    assert torch.equal(x, Batch(1).ids + 7)


def test_shared_values_are_computed_once() -> None:
    net = Net(lambda net, batch: net.a(x := batch.jagged.halves()) + net.b(x, net.count(batch.ids)))
    [((halves,), _), ((other, _), _)] = trace_inputs(net, is_sharded)(Batch())
    assert halves is other
