"""A context around each forward is told which it is, by whatever schedule, as torch's runtime tells it."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from farandole.pipelining import (
    PipelineStage,
    PipelineStageInfo,
    ScheduleGPipe,
    get_schedule_class,
    plan,
    schedule_names,
)
from pipelining.pipeline_support import BACKENDS
from support.devices import DEVICE
from support.processes import await_all, run_ranks

N = 8


class _Noting(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.inside: PipelineStageInfo | None = None
        self.seen: list[tuple[int, int]] = []
        self.fails_in: int | None = None

    @contextlib.contextmanager
    def context(self, info: PipelineStageInfo) -> Iterator[None]:
        self.inside = info
        yield
        self.inside = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inside is not None:
            assert not self.inside.is_metadata_inference
            self.seen.append((self.inside.stage_index, self.inside.microbatch_index))
            if self.inside.microbatch_index == self.fails_in:
                raise ArithmeticError("failed")
        return super().forward(x)


def _note(rank: int, world_size: int) -> None:
    for name in sorted(set(schedule_names()) - {"none"}):
        is_single = name in ("GPipe", "1F1B", "ZB-H1", "ZB-H2")
        made = plan(name, world_size * (1 if is_single else 2), N, num_ranks=world_size)
        mine = [index for index, owner in enumerate(made.rank_of_stage) if owner == rank]
        modules = [_Noting() for _ in mine]
        stages = [
            PipelineStage(module, index, made.num_stages, DEVICE) for module, index in zip(modules, mine, strict=True)
        ]
        schedule: Any = get_schedule_class(name)(stages[0] if is_single else stages, N, nn.MSELoss())
        x = torch.randn(N, 2)
        schedule.step(x, target=x)
        assert not any(module.seen for module in modules)
        handles = [
            stage.register_forward_context(module.context) for module, stage in zip(modules, stages, strict=True)
        ]
        with pytest.raises(RuntimeError, match="a forward context is registered"):
            stages[0].register_forward_context(modules[0].context)
        for step in (schedule.step, schedule.step, schedule.eval):
            step(x, target=x)
            for module, index in zip(modules, mine, strict=True):
                expected = range(N)
                if made.microbatches_of_stage is not None:
                    expected = range(*made.microbatches_of_stage[index])
                assert module.seen == [(index, microbatch) for microbatch in expected], (name, step, module.seen)
                module.seen.clear()
        for handle in handles:
            handle.remove()
        schedule.step(x, target=x)
        assert not any(module.seen for module in modules)


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_schedule_tells_stage_and_microbatch(backend: str) -> None:
    run_ranks(_note, 2, backend, timeout=120)


def _fail(rank: int, world_size: int) -> None:
    module = _Noting()
    stage = PipelineStage(module, rank, world_size, DEVICE)
    schedule = ScheduleGPipe(stage, 4, nn.MSELoss())
    x = torch.randn(4, 2)
    handle = stage.register_forward_context(module.context)
    module.fails_in = 2 if rank == 0 else None
    with pytest.raises((RuntimeError, ArithmeticError), match="failed"):
        schedule.step(x, target=x)
    await_all(rank, world_size)
    module.fails_in = None
    module.seen.clear()
    schedule.step(x, target=x)
    assert module.seen == [(rank, microbatch) for microbatch in range(4)]
    handle.remove()

    module.fails_in = 1 if rank == 0 else None
    stage.register_forward_context(lambda info: _Suppressing(module, info))
    with pytest.raises(RuntimeError, match="the forward context suppressed what the module raised"):
        schedule.step(x, target=x)


class _Suppressing:
    def __init__(self, module: _Noting, info: PipelineStageInfo):
        self.module, self.info = module, info

    def __enter__(self) -> None:
        self.module.inside = self.info

    def __exit__(self, *error: object) -> bool:
        return True


@pytest.mark.parametrize("backend", BACKENDS)
def test_after_a_failed_forward_the_next_step_counts_from_its_beginning(backend: str) -> None:
    run_ranks(_fail, 2, backend)


def _note_of_torchs(rank: int, world_size: int) -> None:
    from torch.distributed.pipelining import PipelineStage as TorchsStage

    if not hasattr(TorchsStage, "register_forward_context"):
        return
    from torch.distributed.pipelining import PipelineStageInfo as TorchsInfo

    assert set(inspect.signature(TorchsInfo).parameters) == set(inspect.signature(PipelineStageInfo).parameters)
    module = _Noting()
    stage: Any = TorchsStage(module, 0, 1, torch.device(DEVICE))
    stage.register_forward_context(module.context)
    ScheduleGPipe(stage, 2, nn.MSELoss()).step(torch.randn(2, 2), target=torch.randn(2, 2))
    assert module.seen == [(0, 0), (0, 1)]


def test_a_context_of_torchs_stage_is_entered() -> None:
    run_ranks(_note_of_torchs, 1, "gloo")
