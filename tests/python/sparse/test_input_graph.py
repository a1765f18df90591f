"""What makes inputs of sharded modules computable ahead of forward, and what is told where they are not."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from input_models import Batch, Counter, Jagged, Sharded, Untraceable, same, watched
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from farandole.sparse._input_graph import CannotTrace, InputGraph, Verdict, trace_inputs
from farandole.sparse._post_processing import PostProcessing
from farandole.sparse._sharded import is_sharded


class Net(nn.Module):
    """Has some of everything; its forward is given."""

    def __init__(self, forward: Callable[[Any, Batch], Any]) -> None:
        super().__init__()
        self.a = Sharded()
        self.b = Sharded()
        self.count = Counter()
        self.scale = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.dense = Untraceable()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.relu = nn.ReLU(inplace=True)
        self.gain = nn.Parameter(torch.ones(4))
        self.fixed = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
        self.sharing = nn.Sequential(self.scale, self.count)
        self.register_buffer("offset", torch.arange(4.0))
        self._forward = forward

    def forward(self, batch: Batch) -> Any:
        return self._forward(self, batch)


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


@torch.no_grad()
def without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.enable_grad():
        return x * 2


def store_and_write(batch: Batch) -> torch.Tensor:
    x = batch.ids + 1
    batch.table["a"] = x
    batch.table["a"].mul_(2)
    return x


def replace_offset(net: Net) -> None:
    net.offset = net.offset + 1


def add_to_offset(net: Net) -> None:
    net.offset += 1


def under_autocast(net: Net, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return batch.ids @ net.fixed


def last(*values: Any) -> Any:
    return values[-1]


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
    "method in place": (lambda net, batch: net.a(batch.ids.clamp_(0)), "clamp_", "clamp_() at test_input_graph"),
    "function in place": (lambda net, batch: net.a(torch.relu_(batch.ids)), "relu_", "in place"),
    "inplace=True": (lambda net, batch: net.a(functional.relu(batch.ids, inplace=True)), "relu", "in place"),
    "inplace by position": (lambda net, batch: net.a(functional.relu(batch.ids, True)), "relu", "in place"),
    "out=": (lambda net, batch: net.a(torch.add(batch.ids, 1, out=batch.pair[0])), "add", "in place"),
    "iadd": (lambda net, batch: net.a(operator.iadd(batch.ids, 1)), "iadd", "in place"),
    "module in place": (lambda net, batch: net.a(net.relu(batch.ids)), "relu", "module 'relu' may change"),
    "item set": (lambda net, batch: net.a(set_item(batch)), "setitem", "setitem may change"),
    "written where it was put": (lambda net, batch: net.a(store_and_write(batch)), "setitem", "setitem may change"),
    "attribute set": (lambda net, batch: net.a(set_attribute(batch)), "setattr_1", "setattr may change"),
    "item appended": (lambda net, batch: (batch.pair.append(batch.ids), net.a(batch.pair)), "append", "append may"),
    "unused method": (lambda net, batch: last(batch.prepare(), net.a(batch.ids)), "prepare", "prepare may change"),
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
    "written later": lambda net, batch: (net.a(batch.ids), batch.ids.add_(1)),
    "dense values written": lambda net, batch: (net.scale(batch.ids).relu_(), net.a(batch.jagged)),
    "a copy written": lambda net, batch: ((batch.ids * 2).relu_(), net.a(batch.ids)),
    "stream recorded": lambda net, batch: (batch.ids.record_stream(None), net.a(batch.ids)),
    "without gradients": lambda net, batch: net.a(without_gradients(batch.ids)) + net.scale(batch.ids),
    "unpacked": lambda net, batch: net.a(*batch.pair[0:2]) if batch is not None else None,
    "after a refused one": lambda net, batch: (net.b(net.scale(batch.ids)), net.a(batch.ids)),
    "same module twice": lambda net, batch: net.a(net.count(batch.ids), net.count(net.count(batch.pair[0]))),
}


@pytest.mark.parametrize("case", [case for case in PIPELINED if case != "unpacked"])
def test_inputs_from_the_batch_alone_are_those_of_a_forward(case: str) -> None:
    net = Net(PIPELINED[case])
    graph = trace_inputs(net, is_sharded)
    assert "a" in graph.names, "\n".join(map(str, graph.verdicts))
    plain = copy.deepcopy(net)
    torch.manual_seed(1)
    inputs = graph.run(Batch(1))
    torch.manual_seed(1)
    if case == "stream recorded":
        plain._forward = PIPELINED["the batch"]
    with watched(plain, ("a",)) as expected:
        plain(Batch(1))
    assert same([inputs.calls[graph.names.index("a")]], expected["a"])


def test_fx_cannot_unpack_what_has_no_known_length() -> None:
    with pytest.raises(CannotTrace, match=r"test_input_graph\.py") as raised:
        trace_inputs(Net(PIPELINED["unpacked"]), is_sharded)
    assert "unpacked" in (raised.value.line or "") and isinstance(raised.value.__cause__, torch.fx.proxy.TraceError)


@pytest.mark.parametrize("name", ["node", "tracer"])
def test_fx_cannot_tell_some_names_from_its_own(name: str) -> None:
    with pytest.raises(CannotTrace):
        trace_inputs(Net(lambda net, batch: net.a(getattr(batch, name))), is_sharded)


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = Sharded()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x) if x.sum() > 0 else self.table(-x)


def test_a_trace_that_stops_names_the_module_and_the_line() -> None:
    net = Net(lambda net, batch: net.tower(batch.ids))
    net.tower = nn.Sequential(_Branches())
    before = set(vars(net)) | set(net._modules)
    with pytest.raises(CannotTrace, match="control flow") as raised:
        trace_inputs(net, is_sharded)
    assert raised.value.module == "tower.0"
    assert "test_input_graph.py" in str(raised.value) and "self.table(x) if x.sum()" in str(raised.value)
    assert set(vars(net)) | set(net._modules) == before
    for forward in (
        lambda net, batch, more: net.a(batch.ids),
        lambda net, batch: net.a(batch.ids) / 0 / int(batch.ids),
    ):
        with pytest.raises(CannotTrace):
            trace_inputs(Net(forward), is_sharded)


def test_tracing_leaves_the_model_as_it_was_and_draws_no_random_numbers() -> None:
    net = Net(lambda net, batch: net.a(batch.ids + torch.rand(4) + torch.ones(4)) + net.b(batch.ids + torch.ones(4)))
    before = (set(vars(net)), set(net.state_dict()), torch.get_rng_state())
    graph = trace_inputs(net, is_sharded)
    assert graph.names == ("b",)
    assert before[:2] == (set(vars(net)), set(net.state_dict())) and torch.equal(before[2], torch.get_rng_state())


def test_what_forward_leaves_in_the_model_is_not_left_by_tracing() -> None:
    def forward(net: Net, batch: Batch) -> torch.Tensor:
        net.seen = batch.ids
        net.offset = net.offset + 1
        return net.a(net.seen * 2)

    net = Net(forward)
    offset = net.offset
    assert trace_inputs(net, is_sharded).names == ("a",)
    assert net.offset is offset and torch.equal(offset, torch.arange(4.0)) and not hasattr(net, "seen")
    net = Net(lambda net, batch: last(setattr(net, "step", net.step + 1), net.a(batch.ids * net.step)))
    net.step = 1
    with pytest.raises(CannotTrace, match=r"forward changes 'step' \(int\)"):
        trace_inputs(net, is_sharded)
    net = Net(lambda net, batch: last(net.a(batch.ids), net.history.append(batch.ids)))
    net.history = [torch.ones(1)]
    with pytest.raises(CannotTrace, match=r"forward changes 'history' \(list\)"):
        trace_inputs(net, is_sharded)
    assert len(net.history) == 1


def test_state_of_post_processing_counts_each_batch_once() -> None:
    def forward(net: Net, batch: Batch) -> torch.Tensor:
        first = net.count(batch.ids)
        return net.a(net.count(batch.pair[0])) + net.scale(net.count(first))

    net = Net(forward)
    plain = copy.deepcopy(net)
    graph = trace_inputs(net, is_sharded)
    assert graph.names == ("a",) and graph.post_processing == ("count",)
    post = PostProcessing(net, graph.post_processing)
    ahead = [graph.run(Batch(seed)) for seed in range(3)]
    for seed, inputs in enumerate(ahead):
        assert len(inputs.results["count"]) == 3  # calls of which no input depends, too
        with post.replaying(inputs.results):
            assert torch.equal(net(Batch(seed)), plain(Batch(seed)))
    assert net.count.count == plain.count.count == 9
    net(Batch(3))
    assert net.count.count == 12  # runs as ever where nothing is replayed
    with pytest.raises(RuntimeError, match="'count' more rarely"), post.replaying(ahead[0].results):
        net.count(Batch().ids)
    with pytest.raises(RuntimeError, match="'count' more often"), post.replaying(ahead[0].results):
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
        ahead = [worker.submit(graph.run, Batch(seed)) for seed in range(200)]
        for seed, inputs in enumerate(ahead):
            with post.replaying(inputs.result(timeout=60).results):
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


class _Switched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = Sharded()

    def forward(self, given: Any, negate: bool = True, *, shift: float = 2.0) -> torch.Tensor:
        x = given.ids if negate is not None else None
        return self.a(-x if negate else x, shift if given.nothing is None else 0)


class _ProxyBatch(Batch):
    def to_proxy(self) -> Batch:
        result = Batch()
        result.__dict__.update(ids=torch.fx.PH, table={"a": torch.fx.PH, "b": torch.fx.PH}, nothing=None)
        return result


def test_a_batch_that_makes_proxies_of_its_parts_may_decide_by_others() -> None:
    graph = trace_inputs(_Switched(), is_sharded, _ProxyBatch())
    [((x, shift), _)] = graph(Batch(2))
    assert torch.equal(x, -Batch(2).ids) and shift == 2.0
    without = trace_inputs(_Switched(), is_sharded)  # a proxy is never None
    assert without(Batch(2))[0][0][1] == 0


def test_sharded_modules_inside_others_are_found_by_name() -> None:
    class Traceable(nn.Sequential):
        _is_pytorch_fx_traceable = True

    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = nn.ModuleDict({"x": Sharded(), "y": Sharded()})
            self.doubling = Traceable(nn.Identity(), nn.Tanh())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.tables["y"](self.doubling(x)) + self.tables["x"](x)

    net = Net(lambda net, batch: net.tower(batch.ids))
    net.tower, net.alias = Tower(), net.a
    graph = trace_inputs(net, is_sharded)
    assert graph.names == ("tower.tables.y", "tower.tables.x")
    assert [verdict.module for verdict in graph.verdicts] == ["a", "b", "tower.tables.x", "tower.tables.y"]
    told = {verdict.module: str(verdict) for verdict in graph.verdicts}
    assert told["tower.tables.x"] == "tower.tables.x: pipelined" and "never calls it" in told["a"]


def test_hooks_of_the_model_that_change_the_batch_count() -> None:
    net = Net(lambda net, batch: net.a(batch.ids))
    net.register_forward_pre_hook(lambda _, args: (args[0]["inner"],))
    [((x,), _)] = trace_inputs(net, is_sharded)({"inner": Batch(3)})
    assert torch.equal(x, Batch(3).ids)


def test_modules_of_fsdp_are_not_looked_into() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.init_device_mesh("cpu", (1,))
        net = Net(lambda net, batch: net.tower(batch.ids) + net.a(net.scale(batch.ids)) + net.b(batch.ids))
        net.tower = nn.Sequential(Sharded(), nn.Linear(4, 4))
        for module in (net.tower, net.scale.requires_grad_(False)):
            fully_shard(module, mesh=mesh)
        graph = trace_inputs(net, is_sharded)
    finally:
        dist.destroy_process_group()
    told = {verdict.module: str(verdict) for verdict in graph.verdicts}
    assert "inside 'tower' (FSDPSequential), which is not looked into" in told["tower.0"]
    assert "'scale', FSDPLinear wrapped by FSDP" in told["a"] and graph.names == ("b",)


def test_a_model_without_sharded_modules_has_no_inputs_and_a_sharded_one_none_of_its_own() -> None:
    graph = trace_inputs(nn.Linear(4, 4), is_sharded)
    assert graph.names == graph.verdicts == () and graph(Batch()) == []
    graph = trace_inputs(Sharded(), is_sharded)
    assert [verdict.pipelined for verdict in graph.verdicts] == [False] and graph.run(Batch()).calls == []
    assert "the model itself: not pipelined" in str(graph.verdicts[0]) and isinstance(graph, InputGraph)


def test_verdicts_are_values() -> None:
    verdict = Verdict("a", True, "a")
    assert replace(verdict) == verdict and hash(verdict) == hash(replace(verdict))
