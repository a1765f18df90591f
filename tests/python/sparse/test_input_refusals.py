"""What is told of inputs that would not be the same ahead of forward."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from input_models import Batch, Net, last
from torch.nn import functional

from farandole.sparse._input_graph import Verdict, trace_inputs
from farandole.sparse._sharded import is_sharded
from support.devices import only_on_cpu

pytestmark = only_on_cpu("inputs are found without a device")


def verdict_of(forward: Callable[[Any, Batch], Any], module: str = "a") -> Verdict:
    graph = trace_inputs(Net(forward), is_sharded)
    assert sorted(verdict.module for verdict in graph.verdicts) == ["a", "b"]
    [verdict] = [verdict for verdict in graph.verdicts if verdict.module == module]
    assert verdict.pipelined == (module in graph.names)
    assert verdict.pipelined or (verdict.reason in str(verdict) and verdict.remedy in str(verdict))
    return verdict


def set_item(batch: Batch) -> torch.Tensor:
    batch.table["a"] = batch.ids
    return batch.table["a"]


def set_attribute(batch: Batch) -> torch.Tensor:
    batch.ids = batch.ids * 2
    return batch.ids


def store_and_write(batch: Batch) -> torch.Tensor:
    x = batch.ids + 1
    batch.table["a"] = x
    batch.table["a"].mul_(2)
    return x


def replace_offset(net: Net) -> None:
    net.offset = net.offset + 1


def add_to_offset(net: Net) -> None:
    net.offset += 1


@torch.fx.wrap
def doubled(x: torch.Tensor) -> torch.Tensor:
    x *= 2
    return x


def under_autocast(net: Net, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return batch.ids @ net.fixed


def normalized(x: torch.Tensor, net: Net, training: bool) -> torch.Tensor:
    return functional.batch_norm(x[None], net.offset, net.fixed, training=training)


def twice(net: Net, batch: Batch) -> torch.Tensor:
    return net.a(batch.ids) + net.a(batch.pair[0])


@torch.library.custom_op("farandole_test::shift", mutates_args=("x",))
def shift(x: torch.Tensor, by: int) -> None:
    x += by


@torch.library.custom_op("farandole_test::shake", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def shake(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


OPERATORS = torch.ops.farandole_test

REFUSALS: dict[str, tuple[Callable[[Any, Batch], Any], str | None, str]] = {
    "output of a sharded module": (lambda net, batch: net.a(net.b(batch.ids) * 2), "b", "another sharded module, 'b'"),
    "trainable module": (lambda net, batch: net.a([net.scale(batch.ids)]), "scale", "'scale', Linear with trainable"),
    "trainable module far away": (
        lambda net, batch: net.a(weights={"x": (torch.cat([batch.ids, net.scale(batch.ids) + 1])[0:2],)}),
        "scale",
        "(weight)",
    ),
    "written between calls of post-processing": (
        lambda net, batch: last(x := net.count(batch.ids), net.a(x), x.add_(1), net.count(x)),
        "add_",
        "may change",
    ),
    "parameter": (lambda net, batch: net.a(batch.ids * net.gain), "gain", "'gain', a parameter that is trained"),
    "parameter of a frozen name": (lambda net, batch: net.a(net.scale.bias), "scale_bias", "'scale.bias'"),
    "method in place": (lambda net, batch: net.a(batch.ids.clamp_(0)), "clamp_", "clamp_() at test_input_refusals"),
    "function in place": (lambda net, batch: net.a(torch.relu_(batch.ids)), "relu_", "in place"),
    "inplace=True": (lambda net, batch: net.a(functional.relu(batch.ids, inplace=True)), "relu", "in place"),
    "inplace by position": (lambda net, batch: net.a(functional.relu(batch.ids, True)), "relu", "in place"),
    "out=": (lambda net, batch: net.a(torch.add(batch.ids, 1, out=batch.pair[0])), "add", "in place"),
    "function that is not looked into": (lambda net, batch: net.a(doubled(batch.ids)), "doubled", "may do more than"),
    "iadd": (lambda net, batch: net.a(operator.iadd(batch.ids, 1)), "iadd", "in place"),
    "module in place": (lambda net, batch: net.a(net.relu(batch.ids)), "relu", "module 'relu' may change"),
    "item set": (lambda net, batch: net.a(set_item(batch)), "setitem", "setitem may change"),
    "written where it was put": (lambda net, batch: net.a(store_and_write(batch)), "setitem", "setitem may change"),
    "attribute set": (lambda net, batch: net.a(set_attribute(batch)), "setattr_1", "setattr may change"),
    "attribute set to what is read": (
        lambda net, batch: last(setattr(batch, "ids", batch.table["b"]), batch.ids.add_(1), net.a(batch.table["b"])),
        "setattr_1",
        "setattr may change",
    ),
    "attribute set of a whole": (
        lambda net, batch: last(setattr(batch, "ids", batch.ids * 2), net.a(net.count(batch))),
        "setattr_1",
        "setattr may change",
    ),
    "attribute set of what may be another part": (
        lambda net, batch: last(setattr(batch.jagged.halves()[0], "k", batch.ids), net.a(batch.jagged)),
        "setattr_1",
        "setattr may change",
    ),
    "item appended": (lambda net, batch: (batch.pair.append(batch.ids), net.a(batch.pair)), "append", "append may"),
    "unused method": (lambda net, batch: last(batch.prepare(), net.a(batch.ids)), "prepare", "prepare may change"),
    "unused method of an operator's name": (
        lambda net, batch: last(batch.jagged.add(batch.ids), net.a(batch.jagged)),
        "add",
        "add may change",
    ),
    "unused method that may sort a list": (
        lambda net, batch: last(batch.pair.sort(), net.a(batch.pair)),
        "sort",
        "sort may change",
    ),
    "unused module": (
        lambda net, batch: last(net.norm(batch.ids), net.a(batch.ids)),
        "norm",
        "module 'norm' may change",
    ),
    "written aside": (lambda net, batch: (batch.ids[1:].add_(1), net.a(batch.ids)), "add_", "add_ may change"),
    "all written": (
        lambda net, batch: last(batch.table.update(b=batch.ids), net.a(batch.table["b"])),
        "update",
        "may change",
    ),
    "another key, maybe equal": (
        lambda net, batch: last(batch.pair[-1].add_(1), net.a(batch.pair[1])),
        "add_",
        "may change",
    ),
    "one in a whole": (lambda net, batch: last(batch.table["a"].add_(1), net.a(batch.table)), "add_", "may change"),
    "buffer written later": (
        lambda net, batch: (net.a(batch.ids + net.offset), net.offset.add_(1)),
        "add_",
        "add_ may change",
    ),
    "buffer of a module that runs": (
        lambda net, batch: net.a(batch.ids + net.norm.running_mean) + net.norm(batch.ids),
        "norm_running_mean",
        "a buffer that 'norm' may change",
    ),
    "buffer in the memory of one that is written": (
        lambda net, batch: (net.a(batch.ids + net.part[0]), net.offset.add_(1)),
        "add_",
        "add_ may change",
    ),
    "buffer in the memory of one of a module that runs": (
        lambda net, batch: net.a(batch.ids + net.mean[0]) + net.norm(batch.ids),
        "mean",
        "a buffer that 'norm' may change",
    ),
    "buffer in the memory of a parameter": (
        lambda net, batch: net.a(batch.ids + net.bias[0]),
        "bias",
        "in the memory of 'scale.bias', a parameter",
    ),
    "post-processing that shares memory with a module": (
        lambda net, batch: net.a(net.reader(batch.ids)) + net.norm(batch.ids),
        "reader",
        "'seen' lies in the memory of what 'norm' has as 'running_mean'",
    ),
    "post-processing whose state is read": (
        lambda net, batch: net.a(net.count(batch.ids)) * net.count.count,
        "count",
        "'count' lies in the memory of 'count.count' of the model",
    ),
    "post-processing that holds what is trained": (
        lambda net, batch: net.a(net.holder(batch.ids)) + net.scale(batch.ids),
        "holder",
        "'others.weight' lies in the memory of what 'scale' has",
    ),
    "running statistics": (
        lambda net, batch: net.a(normalized(batch.ids, net, True)),
        "batch_norm",
        "batch_norm() at test_input_refusals",
    ),
    "running statistics of torch's operator": (
        lambda net, batch: net.a(
            torch.batch_norm(batch.ids[None], None, None, net.mean, net.fixed, True, 0.1, 1e-5, False)
        ),
        "batch_norm",
        "works in place",
    ),
    "running statistics that are read": (
        lambda net, batch: (net.a(batch.ids + net.offset), normalized(batch.ids, net, True)),
        "batch_norm",
        "batch_norm may change",
    ),
    "embedding that renormalizes": (
        lambda net, batch: net.a(functional.embedding(batch.ids.long(), net.rows, max_norm=1.0)),
        "embedding",
        "works in place",
    ),
    "custom operator": (
        lambda net, batch: last(OPERATORS.shift(batch.ids, 1), net.a(batch.ids)),
        "shift",
        "shift may change",
    ),
    "custom random operator": (lambda net, batch: net.a(OPERATORS.shake.default(batch.ids)), None, "drawn twice"),
    "rand": (lambda net, batch: net.a(batch.ids + torch.rand(4)), "rand", "drawn twice"),
    "rand_like": (lambda net, batch: net.a(torch.rand_like(batch.ids)), "rand_like", "drawn twice"),
    "normal_ of a new tensor": (lambda net, batch: net.a(torch.empty(4).normal_()), "normal_", "in place"),
    "dropout": (lambda net, batch: net.a(functional.dropout(batch.ids, 0.5)), "dropout", "drawn twice"),
    "multinomial": (lambda net, batch: net.a(batch.ids.softmax(0).multinomial(2)), "multinomial", "drawn twice"),
    "bernoulli": (lambda net, batch: net.a(torch.bernoulli(batch.ids.sigmoid())), "bernoulli", "drawn twice"),
    "autocast": (lambda net, batch: net.a(under_autocast(net, batch)), "matmul", "under autocast"),
    "called twice": (twice, "a, a_1", "calls it 2 times"),
    "never called": (lambda net, batch: net.scale(batch.ids), None, "never calls it"),
    "no input": (lambda net, batch: net.a(), "a", "without inputs"),
    "post-processing of dense values": (
        lambda net, batch: net.a(net.count(batch.ids)) + net.count(net.scale(batch.ids)),
        "scale",
        "'scale', Linear",
    ),
    "shared post-processing": (
        lambda net, batch: net.a(net.count(batch.ids)) + net.sharing(batch.ids),
        "count",
        "'sharing' calls or shares",
    ),
    "replaced buffer": (lambda net, batch: last(replace_offset(net), net.a(net.offset)), "offset", "forward replaces"),
    "replaced buffer before": (lambda net, batch: last(net.a(net.offset), replace_offset(net)), "offset", "replaces"),
    "buffer added to": (lambda net, batch: last(add_to_offset(net), net.a(batch.ids * net.offset)), "iadd", "in place"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_would_not_be_the_same_ahead_of_forward_is_refused(case: str) -> None:
    forward, node, reason = REFUSALS[case]
    verdict = verdict_of(forward)
    assert (
        not verdict.pipelined and (node is None or verdict.node == node) and reason in verdict.reason and verdict.remedy
    ), verdict
