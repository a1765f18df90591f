"""What the arguments of DistributedDataParallel mean to the reducer, checked."""

from __future__ import annotations

import math
import numbers
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from farandole import _C
from farandole.ddp._ignored import named_parameters

_UNUSED = ("error", "zero_fill", "skip")
_MIB = 1 << 20


@dataclass(frozen=True)
class Replicas:
    """The ranks that hold the same parameters: within an optimizer instance, and, where there are several, across."""

    group: dist.ProcessGroup
    instances: dist.ProcessGroup | None = None

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.group.size() * (self.instances.size() if self.instances is not None else 1)

    def packed(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup | None]:
        return self.group, self.instances


def group_of(name: str, group: Any) -> dist.ProcessGroup:
    """The group, the world by default; a ValueError that names the argument where it is none that this rank is in."""
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise ValueError(f"{name}=None: expected a group, or init_process_group to have been called")
    if not isinstance(group, dist.ProcessGroup):
        is_left_out = isinstance(group, int) and group == dist.GroupMember.NON_GROUP_MEMBER
        given = (
            "GroupMember.NON_GROUP_MEMBER, as new_group() gives it to ranks that it leaves out"
            if is_left_out
            else repr(group)
        )
        raise ValueError(f"{name}={given}: expected a ProcessGroup that this rank ({dist.get_rank()}) is in")
    return group


def replicas_of_experts(others: Replicas, group: Any, instances: Any) -> Replicas:
    """Those of expert_process_group and expert_instance_process_group; ``others`` without."""
    if group is None and instances is not None:
        raise ValueError("expert_instance_process_group: expected expert_process_group with it")
    if group is None:
        return others
    return Replicas(
        group_of("expert_process_group", group),
        None if instances is None else group_of("expert_instance_process_group", instances),
    )


def group_in(process_group: Any, device_mesh: Any) -> dist.ProcessGroup:
    """``process_group``, or a mesh's."""
    if device_mesh is None:
        return group_of("process_group", process_group)
    if process_group is not None:
        raise ValueError(f"process_group={process_group} and device_mesh={device_mesh}: expected only one of them")
    if device_mesh.ndim != 1:
        raise ValueError(f"device_mesh={device_mesh}: expected one dimension, as mesh['replicas'] has")
    return device_mesh.get_group(0)


def unused_policy(
    unused_parameters: str | None, *, find_unused_parameters: bool, static_graph: bool
) -> _C.UnusedParameters:
    """torch's find_unused_parameters is the policy 'skip'; a static graph shows in its first backward what it leaves out."""
    if unused_parameters is None:
        unused_parameters = "skip" if find_unused_parameters or static_graph else "error"
    elif unused_parameters not in _UNUSED:
        raise ValueError(f"unused_parameters={unused_parameters!r}: expected 'error', 'zero_fill' or 'skip'")
    for name, skips in (("find_unused_parameters", find_unused_parameters), ("static_graph", static_graph)):
        if skips and unused_parameters != "skip":
            raise ValueError(f"{name}=True means unused_parameters='skip', not {unused_parameters!r}")
    return getattr(_C.UnusedParameters, unused_parameters)


def input_device(module: torch.nn.Module, device_ids: Any, output_device: Any, dim: int) -> torch.device | None:
    """Where inputs go first; None: they stay. As torch, modules on the CPU take no devices."""
    if dim != 0:
        raise ValueError(f"dim={dim}: expected 0, since the module is on one device")
    if isinstance(device_ids, dist.ProcessGroup):
        raise TypeError("device_ids is a ProcessGroup: expected it by its name, process_group=")
    if not device_ids and output_device is None:  # torch takes an empty list, too
        return None
    devices = {parameter.device for parameter in module.parameters()}
    if any(device.type == "cpu" for device in devices):
        raise ValueError(
            f"device_ids={device_ids}, output_device={output_device}: expected None for both, the module is on the CPU"
        )
    given = [torch.device("cuda", d) if isinstance(d, int) else torch.device(d) for d in device_ids or ()]
    if device_ids is not None and (len(given) != 1 or set(given) != devices):
        raise ValueError(f"device_ids={device_ids}: expected the one device that the module is on, {devices}")
    if output_device is not None:
        out = torch.device("cuda", output_device) if isinstance(output_device, int) else torch.device(output_device)
        if {out} != devices:
            raise ValueError(f"output_device={output_device}: expected the one device that the module is on, {devices}")
    return given[0] if given else None


def home_of(in_main_grad: bool, gradient_as_bucket_view: bool) -> _C.GradHome:
    """Where gradients are reduced; main_grad is a view of its bucket anyway."""
    if in_main_grad:
        return _C.GradHome.main_grad
    return _C.GradHome.bucket_view if gradient_as_bucket_view else _C.GradHome.grad


def grad_place(options: _C.ReducerOptions) -> str:
    """Where a reduced gradient is, for who looks at parameters alone: "grad", "main_grad" or "part of main_grad"."""
    if options.is_sharded:
        return "part of main_grad"
    return "main_grad" if options.home == _C.GradHome.main_grad else "grad"


def is_number(value: Any) -> bool:
    """A finite one, numpy's too."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)


def largest_grad(norm: Any) -> float:
    """That of check_for_large_grads; 0 for none."""
    if not is_number(norm) or norm < 0:
        raise ValueError(f"check_for_large_grads={norm!r}: expected a 2-norm, or 0 for none")
    return float(norm)


def bucket_elements(bucket_size: Any, bucket_cap_mb: Any, module: torch.nn.Module) -> int | None:
    """Elements of a bucket: torch's mebibytes are counted in the widest gradients of the module."""
    if bucket_cap_mb is None:
        if bucket_size is None:
            return None
        if not is_number(bucket_size) or bucket_size != int(bucket_size):
            raise ValueError(f"bucket_size={bucket_size!r}: expected a number of elements or 'auto'")
        return int(bucket_size)  # of 40e6, say
    if bucket_size is not None:
        raise ValueError(f"bucket_cap_mb={bucket_cap_mb} and bucket_size={bucket_size}: expected only one of them")
    if not is_number(bucket_cap_mb) or bucket_cap_mb <= 0:
        raise ValueError(f"bucket_cap_mb={bucket_cap_mb!r}: expected more than 0, mebibytes")
    width = max((parameter.element_size() for parameter in module.parameters() if parameter.requires_grad), default=4)
    return max(1, int(bucket_cap_mb * _MIB) // width)


def parameters_of(module: torch.nn.Module, ignored: Collection[str]) -> list[tuple[str, torch.Tensor, bool, bool]]:
    """(name, parameter, is an expert, is a shared embedding), by Megatron's attributes of parameters."""
    named = list(named_parameters(module, ignored))
    for name, parameter in named:
        if isinstance(parameter, torch.nn.UninitializedParameter):
            raise ValueError(
                f"parameter '{name}' is uninitialized: expected a forward before, which gives it its shape"
            )
        if isinstance(parameter, DTensor):
            raise ValueError(
                f"parameter '{name}' is a DTensor over {parameter.device_mesh}: expected device_mesh=, a dimension of the "
                "mesh over whose other ones it is sharded"
            )
    return [
        (
            name,
            parameter,
            not getattr(parameter, "allreduce", True),
            bool(getattr(parameter, "shared_embedding", False)),
        )
        for name, parameter in named
    ]
