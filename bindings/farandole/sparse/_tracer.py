"""Torch.fx over the part of a model that lies around its sharded modules."""

from __future__ import annotations

import contextlib
import copy
import linecache
import operator
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import Attribute
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from farandole.sparse._batch_paths import Path, follow, replaced
from farandole.sparse._model_state import ModelState
from farandole.sparse._purity import IN_PLACE, is_in_place, is_random, name_of
from farandole.sparse._sharded import is_fsdp, sharded_modules, wrapped_name
from farandole.sparse._shared_memory import memory_of, tensors_of

_INTERNAL = tuple(os.path.dirname(path) + os.sep for path in (torch.__file__, __file__))


class CannotTrace(RuntimeError):
    """Torch.fx stopped in a model's forward. ``module`` and ``line`` say where, if that is known."""

    def __init__(self, message: str, module: str | None = None, line: str | None = None) -> None:
        where = [f"in {module!r}" if module else "", f"at {line}" if line else ""]
        super().__init__(" ".join(filter(None, ["torch.fx cannot trace the model", *where])) + f": {message}")
        self.module = module
        self.line = line


class InputTracer(fx.Tracer):
    """Goes through modules that have sharded ones inside, and no others, so that dense code may be what it likes.

    One placeholder is the batch; further arguments of the model have their defaults. What torch.fx would do at once
    or lose is recorded, too: in-place operators, assignments to items and attributes, and random tensors. The model is
    left as it was.

    Attributes:
        sharded: all sharded modules of the model, by name.
        constants: values that get_attr nodes name and the model does not have.
        assigned: names of tensors that forward replaces in the model.
    """

    proxy_buffer_attributes = True

    def __init__(self, model: nn.Module, is_sharded: Callable[[nn.Module], bool], batch: object = None) -> None:
        super().__init__()
        self.sharded = sharded_modules(model, is_sharded)
        self._model = model
        self._batch: Any = batch
        self._proxied: Any = None
        self._sharded_names = {id(module): name for name, module in self.sharded.items()}
        self._fresh_names: set[str] = set()
        self._hybrid: set[int] = set()
        self._is_hybrid(model)

    def run(self) -> fx.Graph:
        """Raises CannotTrace. The nodes' ``meta`` has the source ``line``, and whether forward set ``autocast``."""
        self._autocast = _autocast()
        self._memory = {memory_of(tensor): name for name, tensor in tensors_of(self._model)}
        self._memory.pop(0, None)
        state = ModelState(self._model)
        try:
            if hasattr(self._batch, "to_proxy"):
                self._proxied = copy.copy(self._batch).to_proxy()
            with _Effects(self):
                graph = self.trace(self._model)
        except Exception as error:  # user's code and torch.fx raise whatever they like
            raise self._stopped(error) from error
        finally:
            changed = state.restore()
            self.constants = {name: changed.pop(name) for name in self._fresh_names & changed.keys()}
            self.assigned = set(changed)
        for name, value in changed.items():
            if not isinstance(value, (fx.Proxy, torch.Tensor)):
                raise CannotTrace(f"forward changes {name!r} ({type(value).__name__}), on which the next may depend")
        return graph

    def get_fresh_qualname(self, prefix: str) -> str:
        name = super().get_fresh_qualname(prefix)
        self._fresh_names.add(name)
        return name

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if id(m) in self._sharded_names or is_fsdp(m):
            return True
        if id(m) in self._hybrid or getattr(m, "_is_pytorch_fx_traceable", False):
            return False
        path = module_qualified_name.split(".")
        above = (self._model.get_submodule(".".join(path[:length])) for length in range(1, len(path)))
        if any(getattr(module, "_is_pytorch_fx_traceable", False) for module in above):
            return super().is_leaf_module(m, module_qualified_name)
        return True

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        name = wrapped_name(m)
        if name is None or self.is_leaf_module(m, self.path_of_module(m)):
            return super().call_module(m, forward, args, kwargs)
        with _passing_on(m, name):
            return super().call_module(m, forward, args, kwargs)

    def path_of_module(self, mod: nn.Module) -> str:
        return self._sharded_names.get(id(mod)) or super().path_of_module(mod)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, fx.Node):  # what proxies call "node" or "root" themselves
            raise ValueError(f"a part of {a.name!r} is named as an attribute of torch.fx's proxies")
        return super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        frame = sys._getframe()
        while frame.f_back is not None and frame.f_code.co_filename.startswith(_INTERNAL):
            frame = frame.f_back
        node.meta["line"] = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
        node.meta["autocast"] = _autocast() != self._autocast
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        batch = self.create_proxy("placeholder", "batch", (), {})
        is_hooked = bool(self._model._forward_pre_hooks) and not is_fsdp(self._model)
        forward = self._model if is_hooked else self._model.forward
        return lambda given: forward(self._specialized(given)), [batch]

    def _specialized(self, proxy: fx.Proxy) -> Any:
        """As the batch's ``to_proxy`` has it: what it left as it is, forward sees while it is traced."""
        if self._proxied is None:
            return proxy

        def replace(path: Path, value: Any) -> Any:
            return follow(proxy, path) if isinstance(value, fx._symbolic_trace.PHBase) else value

        return replaced(self._proxied, replace)

    def attribute_of(self, tensor: Any) -> str | None:
        """The name that a tensor has in the model.

        Raises:
            TypeError: it has none, and lies in the memory of one that has.
        """
        name = self._memory.get(memory_of(tensor))
        if name is None or tensor in self.tensor_attrs:
            return None if name is None else self.tensor_attrs[tensor]
        raise TypeError(f"forward writes to {name!r} in place, in a way that cannot be recorded")

    def _is_hybrid(self, module: nn.Module) -> bool:
        """Whether sharded modules are inside, in what is traced through."""
        if id(module) in self._sharded_names:
            return True
        found = [self._is_hybrid(child) for child in module.children()]  # all of them
        if any(found):
            self._hybrid.add(id(module))
        return any(found)

    def _stopped(self, error: Exception) -> CannotTrace:
        names = {id(module): name for name, module in self._model.named_modules()}
        module = line = None
        for frame, number in traceback.walk_tb(error.__traceback__):
            name = frame.f_code.co_filename
            if not name.startswith(_INTERNAL):
                line = f"{name}:{number} ({linecache.getline(name, number).strip()})"
                module = names.get(id(frame.f_locals.get("self")), module)
        return CannotTrace(f"{type(error).__name__}: {error}", module or None, line)


@contextlib.contextmanager
def _passing_on(wrapper: nn.Module, name: str) -> Iterator[None]:
    """Inside, its forward is that of the module that it wraps, without what it does beside; its hooks are its own."""
    before = {key: value for key, value in vars(wrapper).items() if key == "forward"}
    wrapped = getattr(wrapper, name)
    vars(wrapper)["forward"] = lambda *args, **kwargs: wrapped(*args, **kwargs)
    try:
        yield
    finally:
        del vars(wrapper)["forward"]
        vars(wrapper).update(before)


def _autocast() -> list[tuple[bool, torch.dtype]]:
    devices = ("cpu", torch.accelerator.current_accelerator() or "cpu")
    types = [torch.device(device).type for device in devices]
    return [(torch.is_autocast_enabled(type_), torch.get_autocast_dtype(type_)) for type_ in types]


class _Effects(TorchFunctionMode):
    """Records random functions of no input of the batch, which would be drawn once, in tracing; and writes to tensors of
    the model that are neither buffers nor parameters, which would be done in it."""

    def __init__(self, tracer: InputTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        traced = any(isinstance(leaf, fx.Proxy) for leaf in tree_leaves((args, kwargs)))
        written = self._tracer.attribute_of(args[0]) if args and is_in_place(name_of(func)) else None
        if written is not None:
            args = (self._tracer.create_proxy("get_attr", written, (), {}), *args[1:])
        elif traced or not is_random(func, args, kwargs):
            return func(*args, **kwargs)
        if getattr(torch.Tensor, name_of(func), None) is func:
            return self._tracer.create_proxy("call_method", name_of(func), args, kwargs)
        return self._tracer.create_proxy("call_function", func, args, kwargs)


class _Recorded:
    """What Python does to objects by itself, which torch.fx lets pass."""

    def __getattr__(self, name: str) -> Any:
        return _Attribute(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name not in ("tracer", "node", "root", "attr", "_node"):
            self.tracer.create_proxy("call_function", setattr, (self, name, value), {})

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, key, value), {})

    def __delitem__(self, key: Any) -> None:
        self.tracer.create_proxy("call_function", operator.delitem, (self, key), {})


def _in_place(name: str) -> Callable[[Any, Any], Any]:
    def record(self: Any, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    return record


for _name in IN_PLACE:
    setattr(_Recorded, f"__{_name}__", _in_place(_name))


class _Proxy(_Recorded, fx.Proxy):
    pass


class _Attribute(_Recorded, Attribute):
    pass
