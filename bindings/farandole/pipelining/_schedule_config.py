"""The arguments that all schedules take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from farandole.pipelining._stage_edges import Edge


@dataclass(frozen=True)
class ScheduleConfig:
    n_microbatches: int
    loss_fn: Callable[..., torch.Tensor] | None
    args_chunk_spec: tuple[Any, ...] | None
    kwargs_chunk_spec: dict[str, Any] | None
    output_merge_spec: dict[str, Any] | tuple[Any, ...] | None
    scale_grads: bool
    backward_requires_autograd: bool = True
    edges: Sequence[Edge] | None = None
    check_for_nan_in_loss_and_grad: bool = False
