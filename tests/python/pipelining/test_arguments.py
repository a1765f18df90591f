"""Arguments that cannot run are refused when they are given: argument, value, expectation."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch import nn

from farandole.pipelining import PipelineStage, ScheduleGPipe
from support.processes import run_ranks


def _construct_badly(rank: int, world_size: int) -> None:
    module = nn.Linear(2, 2)

    def stage(*args, **kwargs) -> PipelineStage:
        return PipelineStage(*args, **kwargs)

    for call, kind, text in (
        (lambda: stage(lambda x: x, 0, 1, "cpu"), TypeError, "submodule is a function, expected a torch.nn.Module"),
        (lambda: stage(module, 2, 2, "cpu"), ValueError, "stage_index is 2, expected 0 to 1"),
        (lambda: stage(module, -1, 2, "cpu"), ValueError, "stage_index is -1"),
        (lambda: stage(module, 0, 0, "cpu"), ValueError, "num_stages is 0, expected an int of at least 1"),
        (lambda: stage(module, 0, 1, "cpu"), ValueError, "num_stages is 1, expected at least 2"),
        (lambda: stage(module, 0, 2, "mps"), NotImplementedError, "device is mps, expected cpu or cuda"),
        (lambda: stage(module, 0, 2, "cuda:99"), ValueError, "device is cuda:99, expected one of the "),
        (lambda: stage(module.to("meta"), 0, 2, "cpu"), ValueError, "weight of submodule is on meta"),
        (lambda: stage(nn.Linear(2, 2), 0, 2, "cpu", "x"), TypeError, "input_args is 'x'"),
        (lambda: stage(nn.Linear(2, 2), 0, 2, "cpu", get_mesh=3), TypeError, "get_mesh is a int, expected a callable"),
        (
            lambda: stage(nn.Linear(2, 2), 0, 2, "cpu", dw_builder=3),
            TypeError,
            "dw_builder is a int, expected a callable",
        ),
        (lambda: ScheduleGPipe(module, 1), TypeError, "stage is a Linear"),
    ):
        with pytest.raises(kind) as raised:
            call()
        assert text in str(raised.value), raised.value

    good = PipelineStage(nn.Linear(2, 2), rank, world_size, "cpu")
    for kwargs, kind, text in (
        ({"n_microbatches": 0}, ValueError, "n_microbatches is 0, expected an int of at least 1"),
        ({"n_microbatches": 2.0}, ValueError, "n_microbatches is 2.0"),
        ({"n_microbatches": 1, "loss_fn": 3}, TypeError, "loss_fn is a int, expected a callable"),
    ):
        with pytest.raises(kind) as raised:
            ScheduleGPipe(good, **kwargs)
        assert text in str(raised.value), raised.value
    with pytest.raises(ValueError, match=f"stage_index is {1 - rank}, expected {rank}"):
        ScheduleGPipe(PipelineStage(nn.Linear(2, 2), 1 - rank, world_size, "cpu"), 1)
    with pytest.raises(ValueError, match="num_stages is 3, expected 2"):
        ScheduleGPipe(PipelineStage(nn.Linear(2, 2), rank, 3, "cpu"), 1)
    groups = [dist.new_group([0]), dist.new_group([1])]
    wrapped = nn.parallel.DistributedDataParallel(
        nn.Linear(2, 2), process_group=groups[rank], find_unused_parameters=True
    )
    with pytest.raises(NotImplementedError, match="find_unused_parameters=True"):
        ScheduleGPipe(PipelineStage(wrapped, rank, world_size, "cpu"), 1, nn.MSELoss())


def test_stages_and_schedules_refuse_what_they_cannot_run() -> None:
    run_ranks(_construct_badly, 2, "gloo")


def test_a_stage_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"expected init_process_group\(\) before a stage"):
        PipelineStage(nn.Linear(2, 2), 0, 1, "cpu")
