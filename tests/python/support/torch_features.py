"""What torch has, which differs between the versions that are supported: asked of it, not of its number."""

import inspect

import torch
import torch._C._distributed_c10d as c10d
import torch.distributed as dist

HAS_GET_ERROR = hasattr(c10d.Backend, "get_error")
HAS_ABORT_HOOKS = hasattr(c10d.Backend, "register_abort_hook")

_SPLIT_GROUP = inspect.getsource(dist.split_group)
_DEMANDS_A_DEVICE = "No device associated" in _SPLIT_GROUP
_LOOKS_FOR_AN_ACCELERATOR = _DEMANDS_A_DEVICE and "accelerator.is_available" in _SPLIT_GROUP
SPLITS_GROUPS = not _LOOKS_FOR_AN_ACCELERATOR or torch.accelerator.is_available()


def prepare_to_split() -> None:
    """Some demand a device for split_group, which their init_process_group accepts no CPU for."""
    if _DEMANDS_A_DEVICE:
        dist.group.WORLD.bound_device_id = torch.device("cpu", 0)


def epsilon(dtype: torch.dtype) -> float:
    """finfo's, which up to torch 2.12 has half of float8_e5m2fnuz's: what 1 and the number after it differ by."""
    eps: float = torch.finfo(dtype).eps
    while float(torch.tensor(1 + eps, dtype=torch.float64).to(dtype)) == 1:
        eps *= 2
    return eps
