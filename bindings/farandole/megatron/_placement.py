"""Where a rank works."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from farandole._default_device import default_device
from farandole._parameters import parameters_unread
from farandole.pipelining._devices import one_device, stage_device


def device_of(models: Sequence[nn.Module], group: dist.ProcessGroup | None) -> torch.device:
    """That of the models' parameters or buffers; where they have none, the default one.

    Raises:
        ValueError: models are on several.
    """
    firsts = [
        next((tensor for tensors in (parameters_unread(m), m.buffers()) for tensor in tensors), None) for m in models
    ]
    devices = [stage_device(first.device) for first in firsts if first is not None]
    return one_device(devices) if devices else default_device(group)
