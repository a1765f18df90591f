"""Pipeline parallelism with the names and arguments of ``torch.distributed.pipelining``.

    stage = PipelineStage(module, stage_index=rank, num_stages=world_size, device="cpu")
    schedule = Schedule1F1B(stage, n_microbatches=8, loss_fn=loss_fn)
    schedule.step(x)                          # first stage
    schedule.step(target=y, losses=losses)    # last stage

A step runs in C++ from a compiled plan; Python is entered to call the module and
the loss, no more. Plans can be made, proven, simulated and drawn without running
anything: :func:`plan`, :func:`auto_plan`, :func:`validate`, :func:`simulate`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from farandole._C import Plan, SimulationResult
from farandole.pipelining._captions import draw_text
from farandole.pipelining._chrome_trace import chrome_trace
from farandole.pipelining._forward_context import PipelineStageInfo
from farandole.pipelining._measured import StageCosts, gather_timeline, profile_costs
from farandole.pipelining._measured_transfers import measure_transfers
from farandole.pipelining._memory import MemoryCurve, memory_over_time
from farandole.pipelining._plans import (
    AutoPlan,
    PlanCandidate,
    auto_plan,
    lower,
    plan,
    schedule_names,
    simulate,
    validate,
)
from farandole.pipelining._schedule_bases import PipelineScheduleMulti, PipelineScheduleSingle, ScheduleFromPlan
from farandole.pipelining._schedules import (
    Schedule1F1B,
    ScheduleDualPipe,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleVHalf,
    ScheduleVMin,
    ScheduleZBH1,
    ScheduleZBH2,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)
from farandole.pipelining._stage import PipelineStage
from farandole.pipelining._svg import draw_svg
from farandole.pipelining._tied_weights import TiedWeights
from farandole.pipelining._torch_stages import build_stage
from farandole.pipelining._transfers import Transfers

if TYPE_CHECKING:
    from torch.distributed.pipelining import Pipe, SplitPoint, pipe_split, pipeline

_TORCHS = ("Pipe", "SplitPoint", "pipe_split", "pipeline")
_TORCHS_SINCE_2_15 = ("PipelineActivationLiveness", "analyze_pipeline_activation_liveness")  # takes our schedules


def __getattr__(name: str) -> Any:
    """Torch's tracing front end, as it is: imported when it is asked for, since that takes as long as torch itself."""
    if name not in _TORCHS and name not in _TORCHS_SINCE_2_15:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("torch.distributed.pipelining"), name)


__all__ = [
    "AutoPlan",
    "MemoryCurve",
    "Pipe",
    "PipelineScheduleMulti",
    "PipelineScheduleSingle",
    "PipelineStage",
    "PipelineStageInfo",
    "Plan",
    "PlanCandidate",
    "Schedule1F1B",
    "ScheduleDualPipe",
    "ScheduleDualPipeV",
    "ScheduleFromPlan",
    "ScheduleGPipe",
    "ScheduleInterleaved1F1B",
    "ScheduleInterleavedZeroBubble",
    "ScheduleLoopedBFS",
    "ScheduleVHalf",
    "ScheduleVMin",
    "ScheduleZBH1",
    "ScheduleZBH2",
    "ScheduleZBVZeroBubble",
    "SimulationResult",
    "SplitPoint",
    "StageCosts",
    "TiedWeights",
    "Transfers",
    "auto_plan",
    "build_stage",
    "chrome_trace",
    "draw_svg",
    "draw_text",
    "gather_timeline",
    "get_schedule_class",
    "lower",
    "measure_transfers",
    "memory_over_time",
    "pipe_split",
    "pipeline",
    "plan",
    "profile_costs",
    "schedule_names",
    "simulate",
    "validate",
]
