"""What the arguments of DistributedDataParallel mean to the reducer, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from farandole import _C

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
        raise ValueError(f"{name}={group!r}: expected a ProcessGroup that this rank ({dist.get_rank()}) is in")
    return group


def unused_policy(unused_parameters: str | None, find_unused_parameters: bool) -> _C.UnusedParameters:
    """torch's find_unused_parameters is the policy 'skip'."""
    if unused_parameters is None:
        unused_parameters = "skip" if find_unused_parameters else "error"
    elif unused_parameters not in _UNUSED:
        raise ValueError(f"unused_parameters={unused_parameters!r}: expected 'error', 'zero_fill' or 'skip'")
    elif find_unused_parameters and unused_parameters != "skip":
        raise ValueError(f"find_unused_parameters=True means unused_parameters='skip', not {unused_parameters!r}")
    return getattr(_C.UnusedParameters, unused_parameters)


def bucket_elements(bucket_size: int | None, bucket_cap_mb: float | None, module: torch.nn.Module) -> int | None:
    """Elements of a bucket: torch's mebibytes are counted in the widest gradients of the module."""
    if bucket_cap_mb is None:
        return bucket_size
    if bucket_size is not None:
        raise ValueError(f"bucket_cap_mb={bucket_cap_mb} and bucket_size={bucket_size}: expected only one of them")
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb={bucket_cap_mb}: expected more than 0")
    width = max((parameter.element_size() for parameter in module.parameters() if parameter.requires_grad), default=4)
    return max(1, int(bucket_cap_mb * _MIB) // width)


def parameters_of(module: torch.nn.Module) -> list[tuple[str, torch.Tensor, bool, bool]]:
    """(name, parameter, is an expert, is a shared embedding), by Megatron's attributes of parameters."""
    return [
        (
            name,
            parameter,
            not getattr(parameter, "allreduce", True),
            bool(getattr(parameter, "shared_embedding", False)),
        )
        for name, parameter in module.named_parameters()
    ]
