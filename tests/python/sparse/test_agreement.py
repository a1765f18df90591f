"""What ranks have found out of a model, each for itself, and what they make of it together."""

from __future__ import annotations

from typing import Any

import pytest
from input_models import Batch, Net, same, watched

from farandole.sparse._agreement import Findings, agreed, findings, refuse_unattachable, untraced_on
from farandole.sparse._input_graph import InputGraph, trace_inputs
from farandole.sparse._input_hooks import RecordedInputs, record_inputs
from farandole.sparse._sharded import is_sharded
from farandole.sparse._tracer import CannotTrace
from farandole.sparse._verdict import Verdict
from support.devices import only_on_cpu

pytestmark = only_on_cpu("inputs are found without a device")


def both(net: Any, batch: Batch) -> Any:
    return net.a(batch.ids) + net.b(batch.pair[1])


def found(net: Net, kind: str) -> InputGraph | RecordedInputs:
    if kind == "fx":
        return trace_inputs(net, is_sharded)
    batch = Batch(0)
    with record_inputs(net, is_sharded, batch) as recorded:
        net(batch)
    return recorded


def of_rank(*names: str, without: str = "") -> Findings:
    left = [Verdict(without, False, "node", "it is late", "Be early")] if without else []
    return Findings(None, False, names=names, verdicts=(*(Verdict(name, True) for name in names), *left))


@pytest.mark.parametrize("kind", ["fx", "hooks"])
@pytest.mark.parametrize("first", [("a", "b"), ("b", "a")])
def test_inputs_come_in_the_order_of_the_first_rank(kind: str, first: tuple[str, ...]) -> None:
    net = Net(both)
    own = found(net, kind)
    graph: Any = agreed(own, {3: of_rank(*first), 5: findings(None, False, own)})
    assert graph.names == first and [str(each) for each in graph.verdicts] == ["a: pipelined", "b: pipelined"]
    with watched(net, first) as expected:
        net(Batch(1))
    for name, call in zip(first, graph(Batch(1)), strict=True):
        assert same([call], expected[name])


@pytest.mark.parametrize("kind", ["fx", "hooks"])
def test_what_another_rank_cannot_pipeline_is_left_out_with_its_reason(kind: str) -> None:
    net = Net(lambda net, batch: net.a(net.count(batch.ids)) + net.b(batch.pair[1]))
    own = found(net, kind)
    assert ("a" in own.names) == (kind == "fx")
    left: Any = agreed(own, {0: findings(None, False, own), 2: of_rank("b", without="a"), 4: of_rank("b", without="a")})
    assert left.names == ("b",) and left.post_processing == () and len(left(Batch(1))) == 1
    said = str(left.verdicts[0])
    if kind == "fx":
        assert said == "a: not pipelined: on rank 2, 4: it is late (at node). Be early."
    else:
        assert said.startswith("a: not pipelined: its input 0 is no part of the batch")  # here, too


def test_a_module_that_another_rank_does_not_have_is_left_out() -> None:
    graph = trace_inputs(Net(both), is_sharded)
    graph = agreed(graph, {0: of_rank("b"), 1: findings(None, False, graph)})
    assert graph.names == ("b",)
    assert str(graph.verdicts[0]).startswith("a: not pipelined: on rank 0: the model has no such module. Let all ranks")


def test_nothing_is_computed_where_nothing_is_left() -> None:
    graph = trace_inputs(Net(both), is_sharded)
    graph = agreed(graph, {0: findings(None, False, graph), 1: of_rank()})
    assert graph.names == () and graph(Batch(1)) == []


def test_words_say_all() -> None:
    graph = trace_inputs(Net(both), is_sharded)
    for each in (
        findings("hooks", True),
        findings(None, False, graph),
        findings(None, False, None, CannotTrace("\u00e9", "a", "b.py:1")),
        findings("fx", True, None, KeyError("\udcff")),
    ):
        assert Findings.of_word(each.word()) == each and each.word().isascii()


def test_all_refuse_where_one_fails() -> None:
    failed, well = KeyError("no"), findings(None, False)
    on_other = {0: well, 1: findings(None, False, None, failed)}
    with pytest.raises(RuntimeError, match=r"cannot be attached\nrank 1: KeyError: 'no'"):
        refuse_unattachable(on_other, None)
    with pytest.raises(KeyError) as error:
        refuse_unattachable(on_other, failed)
    assert error.value is failed
    refuse_unattachable({0: well, 1: findings(None, False, None, CannotTrace("no"))}, None)


def test_a_rank_says_what_it_knows_of_tracing() -> None:
    well, not_here = findings(None, False), findings(None, False, None, CannotTrace("here"))
    not_there = findings(None, False, None, CannotTrace("there"))
    assert untraced_on({0: well, 1: well}, 0) == ("", False)
    assert untraced_on({0: not_here, 1: not_there}, 1) == ("torch.fx cannot trace the model: there", False)
    expected = "rank 1: torch.fx cannot trace the model: there", True
    assert untraced_on({0: well, 1: not_there}, 0) == untraced_on({0: well, 1: not_there}, 1) == expected
