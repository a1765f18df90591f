"""Parameters that torch's tensor parallelism has sharded: the part that this rank has is what is averaged."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


def localize(root: torch.nn.Module, replicas: DeviceMesh) -> None:
    """Makes each DTensor among the parameters this rank's part of it, with its attributes, marked as Megatron marks it.

    In forwards modules find DTensors in their place, whose gradients come to the parts; in state dicts, too. Torch's own
    transform leaves DTensors there, which are no parameters.
    """
    parts: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    modules: list[_Module] = []
    for module in root.modules():
        shards = []
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                if parameter.device_mesh == replicas:
                    raise ValueError(
                        f"a {name} is a DTensor over device_mesh={replicas}: expected one over other dimensions"
                    )
                shards.append(_Shard(name, parameter))
                if parameter not in parts:
                    parts[parameter] = _part_of(parameter)
                module._parameters[name] = parts[parameter]
        if shards:
            modules.append(_Module(module, shards))
    if not modules:
        return
    whole = _Root(root, modules)
    hooked: list[_Module | _Root] = [*modules, whole]  # a module may be called by itself, as by checkpoints in backward
    for one in hooked:
        one.module.register_forward_pre_hook(one.begin, prepend=True)
        one.module.register_forward_hook(one.end, always_call=True)
    root.register_state_dict_post_hook(partial(whole.widen))  # torch marks it
    root.register_load_state_dict_pre_hook(whole.narrow)


def _part_of(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    assert isinstance(parameter, DTensor)
    part = torch.nn.Parameter(parameter._local_tensor.detach(), requires_grad=parameter.requires_grad)
    part.__dict__.update(parameter.__dict__)
    if any(placement.is_shard() for placement in parameter.placements):
        part.__dict__.setdefault("tensor_model_parallel", True)
    return part


class _Shard:
    """How a parameter of a module is a part of a DTensor."""

    def __init__(self, name: str, whole: DTensor) -> None:
        self.name = name
        self._mesh, self._placements = whole.device_mesh, whole.placements
        self._shape, self._stride = whole.shape, whole.stride()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Shard:
        return self

    def whole(self, part: torch.Tensor) -> DTensor:
        return DTensor.from_local(
            part, self._mesh, self._placements, run_check=False, shape=self._shape, stride=self._stride
        )

    def part(self, whole: DTensor) -> torch.Tensor:
        return whole.redistribute(self._mesh, self._placements).to_local()


class _Module:
    """A module that has some. It is copied with it."""

    def __init__(self, module: torch.nn.Module, shards: list[_Shard]) -> None:
        self.module = module
        self.shards = shards
        self._depth = 0  # of forwards
        self._awaited: dict[str, torch.nn.Parameter] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> _Module:
        return memo.setdefault(id(self), _Module(copy.deepcopy(self.module, memo), self.shards))

    def begin(self, *unused: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        for shard in self.shards:
            part = self.module._parameters.get(shard.name)
            if part is None:
                continue
            if part.requires_grad and self._awaited.get(shard.name) is not part:
                part.register_hook(_arrived)
                self._awaited[shard.name] = part
            self.module.__dict__[shard.name] = shard.whole(part)  # which is found before the parameter

    def end(self, *unused: Any) -> None:
        self._depth = max(self._depth - 1, 0)  # 0 where a hook before ours has raised
        if self._depth == 0:
            self.reset()

    def reset(self) -> None:
        self._depth = 0
        for shard in self.shards:
            self.module.__dict__.pop(shard.name, None)


class _Root:
    """The module around them all."""

    def __init__(self, module: torch.nn.Module, modules: Iterable[_Module]) -> None:
        self.module = module
        self._modules = list(modules)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Root:
        root = memo[id(self)] = _Root(copy.deepcopy(self.module, memo), ())
        root._modules = copy.deepcopy(self._modules, memo)
        return root

    def begin(self, *unused: Any) -> None:
        for one in self._modules:
            one.reset()  # what is no Exception, as KeyboardInterrupt, passes hooks by
            one.begin()

    def end(self, *unused: Any) -> None:
        for one in self._modules:
            one.end()

    def _named(self) -> Iterable[tuple[str, _Shard]]:
        shards = {one.module: one.shards for one in self._modules}
        for path, module in self.module.named_modules(remove_duplicate=False):
            prefix = path + "." if path else ""
            yield from ((prefix + shard.name, shard) for shard in shards.get(module, ()))

    def widen(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
        for name, shard in self._named():
            part = state.get(prefix + name)
            if isinstance(part, torch.Tensor) and not isinstance(part, DTensor):
                state[prefix + name] = shard.whole(part)

    def narrow(self, module: torch.nn.Module, state: dict[str, Any], prefix: str, *unused: Any) -> None:
        for name, shard in self._named():
            whole = state.get(prefix + name)
            if isinstance(whole, DTensor):
                state[prefix + name] = shard.part(whole)


def _arrived(grad: torch.Tensor) -> torch.Tensor:
    return grad.wait() if isinstance(grad, AsyncCollectiveTensor) else grad
