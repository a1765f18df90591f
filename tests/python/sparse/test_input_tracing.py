"""What torch.fx is let see of a model, and what it leaves there."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from input_models import Batch, Net, Sharded, last
from torch import nn
from torch.distributed.fsdp import fully_shard

from farandole.sparse._input_graph import CannotTrace, InputGraph, Verdict, trace_inputs
from farandole.sparse._sharded import is_sharded
from support.devices import only_on_cpu

pytestmark = only_on_cpu("inputs are found without a device")


def test_fx_cannot_unpack_what_has_no_known_length() -> None:
    with pytest.raises(CannotTrace, match=r"test_input_tracing\.py") as raised:
        trace_inputs(Net(lambda net, batch: net.a(*batch.pair[0:2]) if batch is not None else None), is_sharded)
    assert "batch.pair[0:2]" in (raised.value.line or "") and isinstance(
        raised.value.__cause__, torch.fx.proxy.TraceError
    )


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
    assert "test_input_tracing.py" in str(raised.value) and "self.table(x) if x.sum()" in str(raised.value)
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
    assert [verdict.pipelined for verdict in graph.verdicts] == [False] and graph(Batch()) == []
    assert "the model itself: not pipelined" in str(graph.verdicts[0]) and isinstance(graph, InputGraph)


def test_verdicts_are_values() -> None:
    verdict = Verdict("a", True, "a")
    assert replace(verdict) == verdict and hash(verdict) == hash(replace(verdict))
