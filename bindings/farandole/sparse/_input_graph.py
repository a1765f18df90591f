"""The inputs of a model's sharded modules, computed from a batch without the rest of the model."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.fx.node import Node, map_arg

from farandole.sparse._input_closure import InputClosures
from farandole.sparse._tracer import CannotTrace, InputTracer
from farandole.sparse._verdict import WHOLE_MODEL, Inputs, Refusal, Verdict, refused

__all__ = ["CannotTrace", "InputGraph", "Inputs", "Verdict", "trace_inputs"]


class InputGraph:
    """Computes (args, kwargs) of sharded modules from a batch: one run at a time, in any thread.

    Modules on the way (post-processing) are the model's own and keep their state: PostProcessing notes what they
    return, for the model's forward of that batch to take instead of calling them again. Attributes of the model are
    read when it runs. Nobody differentiates through it: run it in ``no_grad``.

    Attributes:
        names: the sharded modules whose inputs it computes, in call order.
        verdicts: one for every sharded module of the model.
        post_processing: names of the modules that run in it.
        attributes: names of attributes of the model that it reads.
        read_elsewhere: names of modules that run in it and must not write to what they are given.
    """

    def __init__(
        self,
        model: nn.Module,
        verdicts: tuple[Verdict, ...] = (),
        calls: tuple[Node, ...] = (),
        needed: tuple[Node, ...] = (),
        constants: dict[str, Any] | None = None,
        read_elsewhere: frozenset[str] = frozenset(),
        sources: frozenset[Node] = frozenset(),
    ) -> None:
        self.names = tuple(str(call.target) for call in calls)
        self.verdicts = verdicts
        self.traced: _Traced | None = None
        self.read_elsewhere = read_elsewhere
        self._model = model
        constants = constants or {}
        self.post_processing = tuple(dict.fromkeys(str(node.target) for node in needed if node.op == "call_module"))
        attributes = [node for node in needed if node.op == "get_attr" and node.target not in constants]
        self.attributes = tuple(str(node.target) for node in attributes)
        self._attributes = [operator.attrgetter(str(node.target)) for node in attributes]
        outputs = [(call.args, call.kwargs) for call in calls], [node for node in needed if node in sources]
        graph = _subgraph(needed, attributes, outputs)
        own = {str(node.target): constants[str(node.target)] for node in needed if node.target in constants}
        self._compute = fx.GraphModule(own | {name: model.get_submodule(name) for name in self.post_processing}, graph)

    def only(self, names: Sequence[str]) -> InputGraph:
        """For these of its modules, in this order. Once: what that takes is kept no longer."""
        traced, self.traced = self.traced, None
        return self if traced is None or tuple(names) == self.names else traced.computing(names)

    def __call__(self, batch: Any) -> Inputs:
        return self.run(batch)[0]

    def run(self, batch: Any) -> tuple[Inputs, list[Any]]:
        """The inputs, and the parts of the batch that they were computed from."""
        # Not the module's __call__, which prints where it fails.
        result: tuple[Inputs, list[Any]] = self._compute.forward(batch, *(get(self._model) for get in self._attributes))
        return result


def trace_inputs(model: nn.Module, is_sharded: Callable[[nn.Module], bool], batch: object = None) -> InputGraph:
    """Finds by torch.fx how the inputs of sharded modules come from the batch; ``model(batch)`` is not run.

    What forward does in the model's mode (training or not), with the defaults of further arguments, goes for all
    batches. Parts of a batch are never None and of no type, should forward ask, and Python's own random numbers are
    drawn once. No other thread may call modules meanwhile. A batch matters if it has ``to_proxy()``: a copy of it, where
    ``torch.fx.PH`` stands for all that varies; what that leaves as it is, forward may decide on.

    Raises:
        CannotTrace: forward does what torch.fx cannot follow, outside of modules without sharded ones.
    """
    if is_sharded(model):
        return InputGraph(model, (refused("", WHOLE_MODEL),))
    tracer = InputTracer(model, is_sharded, batch)
    if not tracer.sharded:
        return InputGraph(model)
    graph = tracer.run()
    closures = InputClosures(model, tracer, graph)
    found = {name: closures.of(name) for name in tracer.sharded}
    verdicts = tuple(
        refused(name, each) if isinstance(each, Refusal) else Verdict(name, True, each[0].name)
        for name, each in found.items()
    )
    ahead = {name: each for name, each in found.items() if not isinstance(each, Refusal)}
    traced = _Traced(model, tracer.constants, graph, closures, ahead, verdicts)
    names = {call: name for name, (call, _) in ahead.items()}
    inputs = traced.computing([names[node] for node in graph.nodes if node in names])
    inputs.traced = traced
    return inputs


@dataclass(frozen=True)
class _Traced:
    """A model whose sharded modules' inputs are known; ``ahead`` has the call of each that is pipelined, and the nodes
    that it needs."""

    model: nn.Module
    constants: dict[str, Any]
    graph: fx.Graph
    closures: InputClosures
    ahead: Mapping[str, tuple[Node, set[Node]]]
    verdicts: tuple[Verdict, ...]

    def computing(self, names: Sequence[str]) -> InputGraph:
        """The inputs of these modules, in this order."""
        calls = tuple(self.ahead[name][0] for name in names)
        needed = {node for name in names for node in self.ahead[name][1]}
        return InputGraph(
            self.model,
            self.verdicts,
            calls,
            tuple(node for node in self.graph.nodes if node in needed),
            self.constants,
            self.closures.read_elsewhere(needed),
            self.closures.sources(needed),
        )


def _subgraph(needed: tuple[Node, ...], attributes: list[Node], outputs: Any) -> fx.Graph:
    """Of the batch and values of attributes."""
    graph = fx.Graph()
    batch = graph.placeholder("batch")
    copies = {node: graph.placeholder(node.name) for node in attributes}
    for node in needed:
        if node.op == "placeholder":
            copies[node] = batch
        elif node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(map_arg(outputs, copies.__getitem__))
    return graph
