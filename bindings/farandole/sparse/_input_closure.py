"""Which nodes of a traced model a sharded module's inputs depend on, and whether they may run ahead of its forward."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable

import torch
from torch import fx, nn
from torch.fx.node import Node

from farandole.sparse._purity import Memory, changed_by, is_random, is_unknown, name_of
from farandole.sparse._sharded import is_fsdp, is_object_pool
from farandole.sparse._shared_memory import SharedMemory
from farandole.sparse._tracer import InputTracer
from farandole.sparse._verdict import NEVER_CALLED, OBJECT_POOL, Refusal, called_again, no_inputs

_MAKE_IT_A_MODULE = "Make it a module without parameters: such a module runs once per batch, ahead of forward"
_CALL_IT_LATER = "Do it behind the sharded module, or in a module without parameters that returns a copy"


class InputClosures:
    """Of the graph of one model; knows all that is called in its forward.

    Post-processing modules, those without trainable parameters, may have state: all calls of one in a forward run
    ahead, or none.
    """

    def __init__(self, model: nn.Module, tracer: InputTracer, graph: fx.Graph) -> None:
        self._model = model
        self._tracer = tracer
        self._sharded = tracer.sharded
        self._order = {node: index for index, node in enumerate(graph.nodes)}
        self._calls: dict[str, list[Node]] = {}
        for node in graph.nodes:
            if node.op == "call_module":
                self._calls.setdefault(node.target, []).append(node)
        self._modules = {name: model.get_submodule(name) for name in self._calls}
        names = [
            str(node.target) for node in graph.nodes if node.op == "get_attr" and node.target not in tracer.constants
        ]
        attributes = {name: operator.attrgetter(name)(model) for name in dict.fromkeys(names)}
        self._shared = SharedMemory(self._modules, attributes, model)
        self._memory = Memory(lambda node: node.target in tracer.sharded, self._shared.name_of)
        changes = [(node, self._changed_by(node)) for node in graph.nodes]
        self._changes = [(node, self._memory.changed(node, inputs)) for node, inputs in changes if inputs]

    def of(self, name: str) -> tuple[Node, set[Node]] | Refusal:
        """The call of this sharded module, and all nodes that its inputs need."""
        if is_object_pool(self._sharded[name]):
            return OBJECT_POOL
        calls = self._calls.get(name, [])
        if not calls:
            return self._never_called(name)
        if len(calls) > 1:
            return called_again([call.name for call in calls], len(calls))
        [call] = calls
        if not call.args and not call.kwargs:
            return no_inputs(call.name)
        needed: set[Node] = set()
        todo = list(reversed(call.all_input_nodes))
        while todo:
            node = todo.pop()
            if node in needed:
                continue
            refusal = self._objection(node)
            if refusal is not None:
                return refusal
            needed.add(node)
            others = self._calls.get(str(node.target), ()) if node.op == "call_module" else ()
            todo += [*others, *reversed(node.all_input_nodes)]
        return self._changed_before(call, needed) or (call, needed)

    def sources(self, needed: set[Node]) -> frozenset[Node]:
        """Those of these nodes that are parts of the batch, and that others of these are computed from."""
        used = {one for node in needed if not self._memory.is_part(node) for one in node.all_input_nodes}
        return frozenset(one for one in used & needed if one.op == "placeholder" or self._memory.is_part(one))

    def read_elsewhere(self, ahead: set[Node]) -> frozenset[str]:
        """Modules among these nodes that must not write to what they are given: others would see that too early, who read
        it before, or, where forward computes it a second time, not at all, who read it after."""
        calls = [node for node in ahead if node.op == "call_module"]
        return frozenset(
            str(call.target)
            for call in calls
            for given in call.all_input_nodes
            if self._is_read_beside(given, call, ahead)
        )

    def _is_read_beside(self, given: Node, call: Node, ahead: set[Node]) -> bool:
        roots = self._memory.roots(given)
        is_of_batch = all(isinstance(root[0], Node) and root[0].op == "placeholder" for root in roots)
        is_new = all(isinstance(root[0], Node) and root[0].op != "placeholder" for root in roots)
        made_of, made_by = _related(given, lambda node: node.all_input_nodes), _related(call, lambda node: node.users)
        for node in self._order:
            is_before = self._order[node] < self._order[call]
            is_harmless = is_new if is_before else is_of_batch
            is_once = node.op == "call_module" and node in ahead  # before and behind the call, ahead as in a forward
            if is_harmless or is_once or node is call or node in made_of or self._memory.is_part(node):
                continue
            inputs = [one for one in node.all_input_nodes if one not in made_by]
            if any(self._memory.shares(one, roots) for one in inputs):
                return True
        return False

    def _objection(self, node: Node) -> Refusal | None:
        if node.meta["autocast"] and node.op.startswith("call_"):
            reason = f"its input is computed under autocast, which forward sets itself{_line(node)}"
            return Refusal(node.name, reason, "Enter autocast around the whole model")
        if node.op == "call_module":
            return self._module_objection(node)
        if node.op == "get_attr":
            return self._attribute_objection(node)
        if node.op not in ("call_function", "call_method"):
            return None
        what = f"{name_of(node.target)}(){_line(node)}"
        if changed_by(node):
            return Refusal(
                node.name, f"{what} works in place", f"Use the variant that is not in place. {_MAKE_IT_A_MODULE}"
            )
        if is_unknown(node.target):
            reason = f"its input goes through {what}, a function that may do more than to return something"
            return Refusal(node.name, reason, _MAKE_IT_A_MODULE)
        if is_random(node.target, node.args, node.kwargs):
            remedy = f"{_MAKE_IT_A_MODULE}; let it have a torch.Generator of its own"
            return Refusal(node.name, f"{what} is random, and would be drawn twice for a batch", remedy)
        return None

    def _module_objection(self, node: Node) -> Refusal | None:
        name = str(node.target)
        module = self._modules[name]
        if name in self._sharded:
            reason = f"its input depends on the output of another sharded module, {name!r}"
            return Refusal(node.name, reason, "Compute the input from the batch alone, if it should be pipelined")
        trained = next((key for key, parameter in module.named_parameters() if parameter.requires_grad), None)
        if trained is not None or is_fsdp(module):
            what = f"with trainable parameters ({trained})" if trained else "wrapped by FSDP"
            return Refusal(
                node.name,
                f"its input goes through {name!r}, {type(module).__name__} {what}{_line(node)}",
                "Move that module behind the sharded module, or use a collection with feature processors",
            )
        others = (other for other in self._modules if other != name and _share(module, self._modules[other]))
        other = next(others, None)
        if other is not None:
            reason = f"its input goes through {name!r}, which {other!r} calls or shares modules with"
            return Refusal(
                node.name, reason, "Give each a copy of its own: which of their calls comes first is not known"
            )
        shared = self._shared.others_of_module(name, module)
        if shared is not None:
            tensor, place = shared
            where = f"what {place.module!r} has as {place.name!r}" if place.module else f"{place.name!r} of the model"
            reason = f"its input goes through {name!r}, whose tensor {tensor!r} lies in the memory of {where}"
            return Refusal(
                node.name, reason, "Give each memory of its own: which of them is written or read first is not known"
            )
        return None

    def _attribute_objection(self, node: Node) -> Refusal | None:
        name = str(node.target)
        if name in self._tracer.constants:
            return None
        if name in self._tracer.assigned:
            reason = f"its input depends on {name!r}, which forward replaces{_line(node)}"
            return Refusal(node.name, reason, _MAKE_IT_A_MODULE)
        value = operator.attrgetter(name)(self._model)
        if not isinstance(value, torch.Tensor):
            return None
        if value.requires_grad:
            reason = f"its input depends on {name!r}, a parameter that is trained{_line(node)}"
            return Refusal(node.name, reason, "Use that parameter behind the sharded module")
        place = self._shared.others_of_attribute(value)
        if place is not None and place.module is None:
            reason = f"its input depends on {name!r}, which lies in the memory of {place.name!r}, a parameter that is trained"
            return Refusal(node.name, reason, "Use that parameter behind the sharded module")
        if place is not None:
            reason = f"its input depends on {name!r}, a buffer that {place.module!r} may change in the same forward"
            return Refusal(node.name, reason, "Keep a copy of the buffer for the input")
        return None

    def _changed_by(self, node: Node) -> list[Node]:
        if node.op in ("call_function", "call_method"):
            return changed_by(node)
        if node.op != "call_module" or node.target in self._sharded:
            return []
        is_in_place = any(getattr(module, "inplace", False) is True for module in self._modules[node.target].modules())
        return node.all_input_nodes if is_in_place or not node.users else []

    def _changed_before(self, call: Node, needed: set[Node]) -> Refusal | None:
        """What changes an input without being asked for it, as ``batch.ids.add_(1)`` in a line of its own."""
        used = [
            node
            for node in sorted(needed, key=self._order.__getitem__)
            if not all(self._memory.is_part(user) for user in node.users if user in needed or user is call)
        ]
        last = max(self._order[node] for node in (*needed, call))  # calls of post-processing may come after it
        for node, changed in self._changes:
            is_lasting = any(isinstance(root[0], str) for root in changed)
            if (is_lasting or self._order[node] < last) and any(self._memory.shares(other, changed) for other in used):
                what = name_of(node.target) if node.op != "call_module" else f"module {node.target!r}"
                reason = f"{what} may change what its input is made of, in place{_line(node)}"
                return Refusal(node.name, reason, _CALL_IT_LATER)
        return None

    def _never_called(self, name: str) -> Refusal:
        path = name.split(".")
        for length in range(1, len(path)):
            above = ".".join(path[:length])
            if above in self._calls:
                reason = f"it is inside {above!r} ({type(self._modules[above]).__name__}), which is not looked into"
                return Refusal(
                    self._calls[above][0].name, reason, "Keep sharded modules out of modules wrapped by FSDP"
                )
        return NEVER_CALLED


def _share(one: nn.Module, other: nn.Module) -> bool:
    return not {id(module) for module in one.modules()}.isdisjoint(id(module) for module in other.modules())


def _related(node: Node, following: Callable[[Node], Iterable[Node]]) -> set[Node]:
    """It and all that follow."""
    found: set[Node] = set()
    todo = [node]
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += following(one)
    return found


def _line(node: Node) -> str:
    """Where the model's source has it."""
    return f" at {node.meta['line']}"
