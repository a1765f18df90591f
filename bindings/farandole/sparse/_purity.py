"""Which calls compute the same again from the same and change nothing, and which memory two nodes may share."""

from __future__ import annotations

import functools
import inspect
import operator
import re
from collections.abc import Callable
from typing import Any

import torch
from torch.fx.graph import inplace_methods
from torch.fx.node import Node, map_arg

IN_PLACE = frozenset(inplace_methods) - {"setitem"}
_MUTATING_FUNCTIONS = {setattr, delattr, operator.setitem, operator.delitem, operator.iconcat} | {
    getattr(operator, name) for name in IN_PLACE
}
_MUTATING_METHODS = re.compile(
    "__(set|del)(item|attr)__|append|clear|discard|extend|insert|pop|popitem|remove|reverse|setdefault|update"
)
# What changes nothing by its call alone, though nobody uses what it returns: of streams and features, of dicts, and of
# tensors what is no operator.
_HARMLESS_METHODS = re.compile(
    "record_stream|sync|synchronize|wait_stream"
    "|((inverse_indices|length_per_key|lengths|offset_per_key|offsets|weights)(_or_none)?)|device|index_per_key"
    "|size_in_bytes|stride|stride_per_key|stride_per_key_per_rank|to_dict|values|variable_stride_per_key"
    "|items|keys|data_ptr|is_shared|ndimension|nelement|numpy|tolist|unique"
)
# Operators that leave a tensor as it is, and whose names stand for changes in sets, queues, arrays of numpy or loggers.
_AMBIGUOUS_METHODS = ("add", "log", "put", "resize")
_HARMLESS = ("torch", "_operator", "builtins")
_FEATURES = ("torchrec", "fbgemm_gpu", "math")
# Random functions in Python, which are no operators themselves.
_RANDOM_FUNCTIONS = re.compile(r"dropout[123]d|fractional_max_pool[23]d|gumbel_softmax|multi_head_attention_forward")

_NORMS = ("batch_norm", "instance_norm")
_EMBEDDINGS = ("embedding", "embedding_bag")

Root = tuple[Any, ...]  # a node, or an attribute of the model, and the names of parts in it


def name_of(target: Any) -> str:
    """Of a function; a method is its name already."""
    return target if isinstance(target, str) else str(getattr(target, "__name__", target)).partition(".")[0]


def is_in_place(name: str) -> bool:
    """Whether a function or method of this name writes to its first argument."""
    return (name.endswith("_") and not name.endswith("__")) or name == "__setitem__" or name.strip("_") in IN_PLACE


def is_random(target: Any, args: Any, kwargs: Any) -> bool:
    """Whether it draws random numbers, as far as torch says; dropout that is off does not."""
    name = name_of(target)
    if not _RANDOM_FUNCTIONS.fullmatch(name) and not _is_random_operator(target):
        return False
    given = _arguments(target, args, kwargs)
    return given.get("training") is not False and given.get("train") is not False


def is_unknown(target: Any) -> bool:
    """Whether it is a function of other people's, which torch.fx was told not to look into (``torch.fx.wrap``)."""
    return callable(target) and not isinstance(target, type) and _source(target) not in (*_HARMLESS, *_FEATURES)


def changed_by(node: Node) -> list[Node]:
    """Those of its inputs that a function or method may change, or put where later changes reach them."""
    args, kwargs, inputs = node.args, node.kwargs, node.all_input_nodes
    if "out" in kwargs:
        return nodes_in(kwargs["out"])
    name = name_of(node.target)
    if name.endswith("_") and not name.endswith("__"):
        return nodes_in(args[:1] or tuple(kwargs.values())[:1])
    if node.op == "call_method":
        is_ignored = not node.users and not _is_harmless(name)
        return inputs if is_ignored or _MUTATING_METHODS.fullmatch(name) else []
    if node.target in _MUTATING_FUNCTIONS or _is_mutating_operator(node.target):
        return inputs
    given = _arguments(node.target, args, kwargs)
    if given.get("inplace") is True:
        return nodes_in(args[:1] or kwargs)
    if written := _written_beside(name, args, given):
        return written
    is_ignored = not node.users and not isinstance(node.target, type) and _source(node.target) not in _HARMLESS
    return inputs if is_ignored else []


def _written_beside(name: str, args: tuple[Any, ...], given: dict[str, Any]) -> list[Node]:
    """Of functions that update some of their inputs, and whose schemas do not say so."""
    if name in _NORMS:
        has_names = "running_mean" in given  # torch's operator has none, and another order
        training = given.get("training", given.get("use_input_stats")) if has_names else args[5]
        statistics = (given["running_mean"], given["running_var"]) if has_names else args[3:5]
        return [] if training is False else nodes_in(statistics)
    if name in _EMBEDDINGS and given.get("max_norm") is not None:
        return nodes_in(given["weight"])
    return []


def nodes_in(argument: Any) -> list[Node]:
    found: list[Node] = []
    map_arg(argument, found.append)
    return found


class Memory:
    """Which nodes of a graph may share memory or objects: a part has that of its whole, a result that of its inputs."""

    def __init__(self, is_fresh: Callable[[Node], bool], name_of_attribute: Callable[[str], str]) -> None:
        self._is_fresh = is_fresh  # of nodes that call modules: whether all they return is their own
        self._name_of_attribute = name_of_attribute  # the same for those that share memory
        self._roots: dict[Node, frozenset[Root]] = {}

    def shares(self, node: Node, roots: frozenset[Root]) -> bool:
        return any(_overlap(root, other) for root in self.roots(node) for other in roots)

    def roots(self, node: Node) -> frozenset[Root]:
        if node not in self._roots:
            self._roots[node] = self._find(node)
        return self._roots[node]

    def changed(self, by: Node, inputs: list[Node]) -> frozenset[Root]:
        """Of what a call may change: all of these inputs, but of a part of the batch that gets another value (as in
        ``batch.dense = ...``) no more than that."""
        if by.target in (setattr, operator.setitem) and isinstance(by.args[0], Node) and _is_named(by):
            of_whole = self.roots(by.args[0])
            if all(isinstance(root[0], Node) and root[0].op == "placeholder" for root in of_whole):
                replaced = frozenset((*root, by.args[1]) for root in of_whole)
                return replaced.union(*map(self.roots, nodes_in(by.args[2])))
        return frozenset[Root]().union(*map(self.roots, inputs))

    def is_part(self, node: Node) -> bool:
        """Whether it takes of its input a part that is told from others."""
        return (
            node.target in (getattr, operator.getitem)
            and isinstance(node.args[0], Node)
            and self.roots(node).isdisjoint(self.roots(node.args[0]))
        )

    def _find(self, node: Node) -> frozenset[Root]:
        if node.op == "get_attr":
            return frozenset([(self._name_of_attribute(str(node.target)),)])
        if node.op == "placeholder" or (node.op == "call_module" and self._is_fresh(node)):
            return frozenset([(node,)])
        if node.op in ("call_function", "call_method") and _returns_new_tensors(node.target):
            return frozenset([(node,)])
        if node.target in (getattr, operator.getitem) and isinstance(node.args[0], Node):
            of_whole = self.roots(node.args[0])
            return frozenset(root + self._part(root, node) for root in of_whole)
        return frozenset([(node,)]).union(*map(self.roots, node.all_input_nodes))

    def _part(self, root: Root, node: Node) -> Root:
        """What tells it from other parts; two views of a tensor are not told from each other."""
        key = node.args[1]
        if _is_named(node):
            return (key,)
        is_of_batch = len(root) == 1 and isinstance(root[0], Node) and root[0].op == "placeholder"
        return (key,) if is_of_batch and isinstance(key, int) and key >= 0 else ()


def _is_named(node: Node) -> bool:
    """Whether it is about a part with a name, which no tensor has."""
    key = node.args[1]
    return isinstance(key, str) and (
        node.target in (operator.getitem, operator.setitem) or not hasattr(torch.Tensor, key)
    )


def _overlap(one: Root, other: Root) -> bool:
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def _arguments(target: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """By name, with defaults, where the function has a signature."""
    if isinstance(target, str):
        return dict(kwargs)
    try:
        bound = inspect.signature(target).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return dict(kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)


def _source(target: Any) -> str:
    return str(getattr(target, "__module__", None) or "torch").partition(".")[0]


@functools.cache
def _overloads(target: Any) -> tuple[torch._ops.OpOverload, ...]:
    """Of an operator; of a function or method, those of torch's operator of that name."""
    if isinstance(target, torch._ops.OpOverload):
        return (target,)
    is_packet = isinstance(target, torch._ops.OpOverloadPacket)
    packet = target if is_packet else getattr(torch.ops.aten, name_of(target), None)
    return tuple(getattr(packet, overload) for overload in packet.overloads()) if packet is not None else ()


@functools.cache
def _is_harmless(method: str) -> bool:
    """Whether its call alone changes nothing: that of an operator that writes to none of its arguments, say. Those that
    are called ``out`` are no method's."""
    if _HARMLESS_METHODS.fullmatch(method):
        return True
    if method in _AMBIGUOUS_METHODS or not hasattr(torch.Tensor, method):
        return False
    schemas = [overload._schema for overload in _overloads(method)]
    return bool(schemas) and all(
        schema.returns
        and not any(
            argument.alias_info is not None and argument.alias_info.is_write and not argument.kwarg_only
            for argument in schema.arguments
        )
        for schema in schemas
    )


def _is_mutating_operator(target: Any) -> bool:
    if not isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return False
    return all(overload._schema.is_mutable for overload in _overloads(target))


def _is_random_operator(target: Any) -> bool:
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in _overloads(target))


@functools.cache
def _returns_new_tensors(target: Any) -> bool:
    """As schemas say; but those of operators made of others lie, when they return what they were given."""
    if target is operator.add:  # lists, too
        return False
    names = {overload: overload.name() for overload in _overloads(target)}
    overloads = [o for o, name in names.items() if torch._C._dispatch_has_kernel(name) and not o._schema.is_mutable]
    return bool(overloads) and not any(
        any(returned.alias_info is not None for returned in overload._schema.returns)
        or torch._C._dispatch_has_kernel_for_dispatch_key(names[overload], "CompositeImplicitAutograd")
        for overload in overloads
    )
