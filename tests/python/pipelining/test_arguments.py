"""Arguments that cannot run are refused when they are given: argument, value, expectation."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from farandole.pipelining import PipelineStage, ScheduleGPipe, ScheduleInterleaved1F1B, get_schedule_class
from support.devices import DEVICE, only_on_cpu
from support.processes import run_ranks


def _construct_badly(rank: int, world_size: int) -> None:
    module = nn.Linear(2, 2)

    def stage(*args, **kwargs) -> PipelineStage:
        return PipelineStage(*args, **kwargs)

    for call, kind, text in (
        (lambda: stage(lambda x: x, 0, 1, DEVICE), TypeError, "submodule is a function, expected a torch.nn.Module"),
        (lambda: stage(module, 2, 2, DEVICE), ValueError, "stage_index is 2, expected 0 to 1"),
        (lambda: stage(module, -1, 2, DEVICE), ValueError, "stage_index is -1"),
        (lambda: stage(module, 0, 0, DEVICE), ValueError, "num_stages is 0, expected an int of at least 1"),
        (lambda: stage(module, 0, 1, DEVICE), ValueError, "num_stages is 1, expected at least 2"),
        (lambda: stage(module, 0, 2, "mps"), NotImplementedError, "device is mps, expected cpu or cuda"),
        (lambda: stage(module, 0, 2, "cuda:99"), ValueError, "device is cuda:99, expected one of the "),
        (lambda: stage(nn.Linear(2, 2), 0, 2, DEVICE, "x"), TypeError, "input_args is 'x'"),
        (lambda: stage(nn.Linear(2, 2), 0, 2, DEVICE, get_mesh=3), TypeError, "get_mesh is a int, expected a callable"),
        (
            lambda: stage(nn.Linear(2, 2), 0, 2, DEVICE, dw_builder=3),
            TypeError,
            "dw_builder is a int, expected a callable",
        ),
        (lambda: ScheduleGPipe(module, 1), TypeError, "stage is a Linear"),
    ):
        with pytest.raises(kind) as raised:
            call()
        assert text in str(raised.value), raised.value

    good = PipelineStage(nn.Linear(2, 2), rank, world_size, DEVICE)
    for kwargs, kind, text in (
        ({"n_microbatches": 0}, ValueError, "n_microbatches is 0, expected an int of at least 1"),
        ({"n_microbatches": 2.0}, ValueError, "n_microbatches is 2.0"),
        ({"n_microbatches": 1, "loss_fn": 3}, TypeError, "loss_fn is a int, expected a callable"),
    ):
        with pytest.raises(kind) as raised:
            ScheduleGPipe(good, **kwargs)
        assert text in str(raised.value), raised.value
    with pytest.raises(ValueError, match=f"stage_index is {1 - rank}, expected {rank}"):
        ScheduleGPipe(PipelineStage(nn.Linear(2, 2), 1 - rank, world_size, DEVICE), 1)
    with pytest.raises(ValueError, match="num_stages is 3, expected 2"):
        ScheduleGPipe(PipelineStage(nn.Linear(2, 2), rank, 3, DEVICE), 1)
    groups = [dist.new_group([0]), dist.new_group([1])]
    wrapped = nn.parallel.DistributedDataParallel(
        nn.Linear(2, 2), process_group=groups[rank], find_unused_parameters=True
    )
    with pytest.raises(NotImplementedError, match="find_unused_parameters=True"):
        ScheduleGPipe(PipelineStage(wrapped, rank, world_size, DEVICE), 1, nn.MSELoss())


def test_stages_and_schedules_refuse_what_they_cannot_run() -> None:
    run_ranks(_construct_badly, 2, "gloo")


@only_on_cpu("no ranks")
def test_a_stage_needs_a_process_group() -> None:
    with pytest.raises(RuntimeError, match=r"expected init_process_group\(\) before a stage"):
        PipelineStage(nn.Linear(2, 2), 0, 1, "cpu")


TORCHS = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
BASES = ("PipelineScheduleSingle", "PipelineScheduleMulti")


def _construct_as_torchs(rank: int, world_size: int) -> None:
    """Each argument that torch's have, by position and by name, with a value of its own where it is looked at here."""
    from torch.distributed.pipelining import PipelineStage as TorchsStage
    from torch.distributed.pipelining.schedules import get_schedule_class as torchs

    given = {"scale_grads": False, "backward_requires_autograd": False, "output_merge_spec": (1,)}
    for name in (*TORCHS, *BASES):
        theirs, ours = torchs(name), get_schedule_class(name)
        parameters = list(inspect.signature(theirs).parameters.values())
        num_stages = 2 if "V" in name else 1
        stages = [PipelineStage(nn.Linear(2, 2), i, num_stages, DEVICE) for i in range(num_stages)]
        first: Any = stages[0] if parameters[0].name == "stage" else stages
        values = {parameters[0].name: first, "n_microbatches": 4, "loss_fn": nn.MSELoss()}
        values |= {each.name: given.get(each.name, each.default) for each in parameters[3:]}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for schedule in (ours(*values.values()), ours(**values)):
                assert schedule.scale_grads is False, name
                assert schedule._config.output_merge_spec == (1,), name
                assert schedule._config.backward_requires_autograd is ("backward_requires_autograd" not in values), name
        for method in ("step", "eval"):
            missing = set(inspect.signature(getattr(theirs, method)).parameters) - set(
                inspect.signature(getattr(ours, method)).parameters
            )
            assert not missing, f"{name}.{method} has no {missing}"
    assert set(inspect.signature(TorchsStage).parameters) <= set(inspect.signature(PipelineStage).parameters)

    for option, value in (
        ("defer_pp_recv", True),
        ("max_active_stages", 2),
        ("unshard_lookahead", (2,)),
        ("defer_reduce_grad_wait", True),
        ("max_outstanding_sends", 2),
    ):
        for schedule_class in (ScheduleInterleaved1F1B, get_schedule_class("LoopedBFS")):
            stage = PipelineStage(nn.Linear(2, 2), 0, 1, DEVICE)
            with pytest.warns(UserWarning, match=f"{schedule_class.__name__}: {option} changes nothing"):
                schedule_class([stage], 2, **{option: value})


def test_torchs_arguments_are_taken_by_position_and_by_name() -> None:
    run_ranks(_construct_as_torchs, 1, "gloo")
