"""Where a rank works that has nothing to tell it."""

from __future__ import annotations

import torch
import torch.distributed as dist


def default_device(group: dist.ProcessGroup | None) -> torch.device:
    """The process's current GPU where it uses one, and the group, if any, has a backend for CUDA tensors; else the CPU."""
    uses_gpu = torch.cuda.is_initialized() and (group is None or torch.device("cuda") in group._device_types)
    return torch.device("cuda", torch.cuda.current_device()) if uses_gpu else torch.device("cpu")
