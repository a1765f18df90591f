"""When a step may be captured in a CUDA graph; as if it were, on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from farandole.pipelining import PipelineStage, Schedule1F1B, _captures, _schedule
from support.devices import DEVICE, only_on_cpu
from support.processes import run_ranks

TOO_EARLY = "rank 1 captures a step in a graph, expected two steps with the same shapes outside of a graph before it"


def _steps(rank: int, world_size: int) -> None:
    schedule = Schedule1F1B(PipelineStage(nn.Linear(4, 4), rank, world_size, DEVICE), 4, nn.MSELoss())
    batch = torch.ones(8, 4)

    def step(captured: bool, batch: torch.Tensor = batch) -> None:
        _schedule.is_captured = lambda device: captured  # type: ignore[attr-defined]
        schedule.step(batch, target=batch)

    for _ in range(2):
        with pytest.raises(RuntimeError, match=TOO_EARLY):
            step(True)
        step(False)
    step(False)
    step(True)
    step(True)
    with pytest.raises(RuntimeError, match=TOO_EARLY):
        step(True, torch.ones(12, 4))
    for _ in range(2):
        step(False)
    with pytest.raises(RuntimeError, match=r"do not run the same step: rank 0 runs .*, captured in a graph\n"):
        step(rank == 0)
    step(False)


def test_a_step_is_captured_on_all_ranks_and_when_they_are_connected():
    run_ranks(_steps, 2, "farandole")


@only_on_cpu("no tensors")
def test_what_a_graph_would_not_replay_is_refused_by_name():
    given = dict(checks_for_nan=False, wrapped=[], over_ucx=False)
    _captures.check_capturable(**given)
    with pytest.raises(NotImplementedError, match="check_for_nan_in_loss_and_grad is True"):
        _captures.check_capturable(**given | dict(checks_for_nan=True))
    with pytest.raises(NotImplementedError, match="stage 3 is wrapped for data parallelism"):
        _captures.check_capturable(**given | dict(wrapped=["stage 3"]))
    with pytest.raises(NotImplementedError, match="FARANDOLE_CUDA_MESSAGES is 'ucx'"):
        _captures.check_capturable(**given | dict(over_ucx=True))
