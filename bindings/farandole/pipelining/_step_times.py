"""When the actions of this rank's last step ran: as its host saw them, or on a GPU as that did."""

from __future__ import annotations

from typing import NamedTuple

import torch

from farandole import _C


class StepTimes(NamedTuple):
    actions: list[tuple[str, float, float]]  # (action, start, end) in seconds from the step's beginning
    seconds: float  # of the step
    compute_seconds: float  # of its forwards and backwards


def step_times(executor: _C.PipelineExecutor | None, device: torch.device) -> StepTimes | None:
    """None before the first step, or after one that was refused.

    Raises:
        RuntimeError: the step was on a device that did not note its times.
    """
    actions = [] if executor is None else executor.last_step_trace()
    if executor is None or not actions:
        return None
    if device.type == "cpu":
        return StepTimes(actions, executor.last_step_seconds, executor.last_compute_seconds)
    on_device = executor.last_device_trace()
    if on_device is None:
        raise RuntimeError(
            f"the times of a step on {device} that did not note them, expected one after schedule.times_device = True, "
            "outside of CUDA graphs: for the host an action there ends when it has been launched"
        )
    return StepTimes(*on_device)
