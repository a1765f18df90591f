"""What programs import from ``torch.distributed.pipelining.schedules``, under the same names."""

from __future__ import annotations

import importlib
from typing import Any

from farandole.pipelining._schedule import PipelineSchedule as _PipelineSchedule
from farandole.pipelining._schedule_bases import PipelineScheduleMulti, PipelineScheduleSingle
from farandole.pipelining._schedule_bases import PipelineScheduleMulti as _PipelineScheduleRuntime
from farandole.pipelining._schedules import (
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)

_TORCHS = {
    *("_Action", "_ComputationType", "PipelineActivationLiveness", "analyze_pipeline_activation_liveness"),
    *("FORWARD", "FULL_BACKWARD", "BACKWARD_INPUT", "BACKWARD_WEIGHT", "OVERLAP_F_B"),
    *("UNSHARD", "RESHARD", "REDUCE_GRAD", "SEND_F", "RECV_F", "SEND_B", "RECV_B"),
}


def __getattr__(name: str) -> Any:
    """Torch's actions, of which ``pipeline_order`` consists: imported when they are asked for."""
    if name not in _TORCHS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("torch.distributed.pipelining.schedules"), name)


__all__ = [
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "Schedule1F1B",
    "ScheduleDualPipeV",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleZBVZeroBubble",
    "_PipelineSchedule",
    "_PipelineScheduleRuntime",
    "get_schedule_class",
]
