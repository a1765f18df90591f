"""What steps leave to what comes between them and after them: wrappers that average, buffers, and types."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.ddp import DistributedDataParallel
from farandole.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from pipelining.pipeline_support import BACKENDS
from support.devices import DEVICE, seeded
from support.processes import run_ranks

WRAPPERS: list[Any] = [DistributedDataParallel, nn.parallel.DistributedDataParallel]


def _own_pipeline(rank: int, world_size: int) -> Any:
    return [dist.new_group([other]) for other in range(world_size)][rank]


def _average(rank: int, world_size: int) -> None:
    own = _own_pipeline(rank, world_size)
    for wrapper in WRAPPERS:
        torch.manual_seed(1)
        model = wrapper(nn.Linear(3, 3))
        schedule = ScheduleGPipe(PipelineStage(model, 0, 1, DEVICE, group=own), 2, nn.MSELoss())
        batch = torch.full((4, 3), rank + 1.0)

        def averages(model: Any = model, wrapper: Any = wrapper) -> None:
            model.zero_grad()
            model(torch.full((1, 3), rank + 1.0)).sum().backward()
            grad = model.module.weight.grad
            assert torch.equal(grad, torch.full((3, 3), 1.5)), (wrapper, grad)

        schedule.step(batch, target=batch, finalize_gradients=False)
        averages()
        schedule.step(batch, target=batch)
        averages()
        with model.no_sync():
            schedule.step(batch, target=batch)
            assert not model.require_backward_grad_sync
        averages()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_outside_of_pipelines_is_averaged_after_any_step(backend: str) -> None:
    run_ranks(_average, 2, backend)


def _keep_buffers(rank: int, world_size: int) -> None:
    own = _own_pipeline(rank, world_size)
    seen = []
    for wrapper in WRAPPERS:
        torch.manual_seed(1)
        model = wrapper(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)))
        schedule = ScheduleGPipe(PipelineStage(model, 0, 1, DEVICE, group=own), 2, nn.MSELoss())
        for step in range(3):
            batch = torch.randn(8, 3, generator=seeded(10 * step + rank))
            schedule.step(batch, target=batch)
        seen.append({name: buffer.clone() for name, buffer in model.module.named_buffers()})
    torch.testing.assert_close(seen[0], seen[1], rtol=0, atol=1e-6)


def test_buffers_of_replicated_stages_are_those_that_torchs_wrapper_gives() -> None:
    run_ranks(_keep_buffers, 2, "farandole")


def _change_types(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    stage = PipelineStage(nn.Linear(4, 4), rank, world_size, DEVICE)
    schedule = Schedule1F1B(stage, 3, lambda output, target: (output.float() - target).square().mean())
    batch, target = torch.randn(6, 4), torch.randn(6, 4)
    kinds = set()
    for is_on in (False, True, True, False):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=is_on):
            output = schedule.step(batch, target=target)
        if rank == world_size - 1:
            kinds.add(output.dtype)
            assert output.dtype == (torch.bfloat16 if is_on else torch.float32)
    stage.submod.bfloat16()
    schedule.step(batch.bfloat16(), target=target)
    stage.submod.float()
    schedule.step(batch, target=target)


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_and_types_may_change_between_steps(backend: str) -> None:
    run_ranks(_change_types, 2, backend)
