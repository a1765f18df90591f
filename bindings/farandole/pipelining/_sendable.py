"""What stages hand over must have memory of its own: results of asynchronous collectives are awaited, and of a DTensor
its local part is sent, from which the next stage makes one again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

GetMesh = Callable[[tuple[str, ...], Any], Any]


@dataclass(frozen=True)
class _Distributed:
    """A DTensor on its way: its local part, and what the ranks of the next stage make one of that by."""

    local: torch.Tensor
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    mesh_dim_names: tuple[str, ...]
    mesh_shape: tuple[int, ...]
    mesh_layout: Any


class Meshes:
    """The meshes that a stage's DTensors are on: those of the stages before are on other ranks, with the same names."""

    def __init__(self, examples: Sequence[Any], get_mesh: GetMesh | None):
        self._get_mesh = get_mesh
        self._examples = examples
        self._known: list[Any] = []

    def learn(self, module: nn.Module) -> None:
        """Those of the module's parameters and buffers, as it is when it is about to run."""
        tensors = (*self._examples, *module.parameters(), *module.buffers())
        self._known = list({id(tensor.device_mesh): tensor.device_mesh for tensor in _dtensors(tensors)}.values())

    def of(self, sent: _Distributed) -> Any:
        """The one that has the names and sizes of the sender's."""
        names = sent.mesh_dim_names
        mesh = None if self._get_mesh is None else self._get_mesh(names, sent.mesh_layout)
        if mesh is None:
            mesh = next(self._fitting(names, sent.mesh_shape), None)
        if mesh is None:
            raise RuntimeError(
                f"a DTensor arrived on a mesh with the dimensions {names} of sizes {sent.mesh_shape}, which no parameter "
                "of the stage is on, expected get_mesh=lambda mesh_dim_names, mesh_layout: mesh"
            )
        return mesh

    def _fitting(self, names: tuple[str, ...], shape: tuple[int, ...]) -> Iterator[Any]:
        for mesh in self._known:
            known = mesh.mesh_dim_names or ()
            if known != names and names and set(names) < set(known):
                mesh = mesh[names]  # parameters that FSDP2 has sharded, too
            if (mesh.mesh_dim_names or ()) == names and tuple(mesh.shape) == shape:
                yield mesh


class StageCall:
    """A stage's module as the executor calls it: it gives and gets tensors that can be sent."""

    def __init__(self, call: Callable[..., Any], meshes: Meshes, *, is_first: bool, is_last: bool):
        self._call = call
        self._meshes = meshes
        self._is_first = is_first  # what it is called with is the user's
        self._is_last = is_last  # what it returns is the user's and the loss's

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._is_first and any(type(arg) is not torch.Tensor for arg in args):
            args = tree_map_only(_Distributed, self._arrived, args)
        result = self._call(*args, **kwargs)
        return result if self._is_last or type(result) is torch.Tensor else _sendable(result)

    def _arrived(self, sent: _Distributed) -> Any:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            sent.local, self._meshes.of(sent), sent.placements, run_check=False, shape=sent.shape, stride=sent.stride
        )


def plain_loss(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The loss as one number that each rank has, where it is computed from DTensors."""

    def call(*args: Any, **kwargs: Any) -> Any:
        loss = loss_fn(*args, **kwargs)
        if type(loss) is torch.Tensor or not isinstance(loss, torch.Tensor):
            return loss
        return as_sent(next((one.full_tensor() for one in _dtensors([loss])), loss))

    return call


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Of a DTensor, what this rank has of it; any other tensor itself."""
    return next((one.to_local() for one in _dtensors([tensor])), tensor)


def as_sent(tensor: torch.Tensor) -> Any:
    """What is sent in a tensor's place, itself where it has memory.

    Raises:
        TypeError: of this class of tensors nothing is known that could be sent.
    """
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return tensor
    for distributed in _dtensors([tensor]):
        mesh = distributed.device_mesh
        return _Distributed(
            as_sent(distributed.to_local()),
            tuple(distributed.placements),
            distributed.shape,
            distributed.stride(),
            tuple(mesh.mesh_dim_names or ()),
            tuple(mesh.shape),
            getattr(mesh, "_layout", None),
        )
    functional: Any = sys.modules.get("torch.distributed._functional_collectives")  # of who makes such tensors
    if functional is not None and isinstance(tensor, functional.AsyncCollectiveTensor):
        return tensor.clone()  # which waits, and is differentiated
    raise TypeError(
        f"the module returned a {type(tensor).__name__}, expected a torch.Tensor or a DTensor: of other classes with a "
        "__torch_dispatch__ it is not known what to send"
    )


def _sendable(result: Any) -> Any:
    if type(result) in (tuple, list) and all(type(item) is torch.Tensor for item in result):
        return result
    leaves, structure = tree_flatten(result)
    sent = [as_sent(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    if all(one is other for one, other in zip(sent, leaves, strict=True)):
        return result
    return tree_unflatten(sent, structure)


def _dtensors(tensors: Sequence[Any]) -> Iterator[Any]:
    module: Any = sys.modules.get("torch.distributed.tensor")  # whoever has such a tensor has imported it
    return iter(()) if module is None else (tensor for tensor in tensors if isinstance(tensor, module.DTensor))
