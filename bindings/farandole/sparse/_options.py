"""What pipelines are written with, and arguments that all have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from typing_extensions import TypeVar

# A batch, and what the model makes of it; torchrec's pipelines are written with both, as in annotations.
In = TypeVar("In", default=Any)
Out = TypeVar("Out", default=Any)

ModelForward = Callable[[Any], tuple[torch.Tensor, Any]]


class Options(TypedDict, total=False):
    """Arguments by name that all pipelines have."""

    enable_amp: bool | torch.dtype
    enable_grad_scaling: bool
    grad_scaler: torch.amp.GradScaler | None
    grad_accum: int | None
    process_group: dist.ProcessGroup | None
    load_on_thread: bool | None
