"""What a schedule computes, read and written as torch's actions, counted by torch, and of its number of microbatches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed.pipelining
from torch import nn

from farandole.pipelining import (
    PipelineScheduleMulti,
    PipelineScheduleSingle,
    PipelineStage,
    Plan,
    ScheduleDualPipe,
    ScheduleFromPlan,
    get_schedule_class,
    plan,
    simulate,
)
from pipelining.pipeline_support import MULTI, SINGLE
from support.devices import DEVICE
from support.processes import run_ranks


def _show_orders(rank: int, world_size: int, folder: str) -> None:
    """What a schedule computes can be read as torch's actions, and written."""
    for name in [*SINGLE, *MULTI, *(["DualPipe"] if world_size > 1 else [])]:
        made = plan(name, 2 * world_size if name in [*MULTI, "DualPipe"] else world_size, 8, num_ranks=world_size)
        stages = [
            PipelineStage(nn.Linear(2, 2), i, made.num_stages, DEVICE)
            for i, owner in enumerate(made.rank_of_stage)
            if owner == rank
        ]
        schedule: Any = get_schedule_class(name)(stages[0] if name in SINGLE else stages, 8, nn.MSELoss())
        order = schedule.pipeline_order
        assert [[str(action) for action in order[number]] for number in range(world_size)] == made.actions, name
        assert order[0][0].microbatch_index == 0, name
        order[0].clear()
        assert schedule.pipeline_order[0], name
        if name in SINGLE:
            continue
        for format in ("compute_only", "compute_comms"):
            path = f"{folder}/{name}.{format}.{rank}.csv"
            schedule._dump_csv(path, format)
            loaded = ScheduleDualPipe if name == "DualPipe" else PipelineScheduleMulti
            again: Any = loaded(stages, 8, nn.MSELoss())
            again._load_csv(path, format)
            assert again.pipeline_order == schedule.pipeline_order, f"{name}, {format}"
            assert again.plan() == schedule.plan(), f"{name}, {format}"
        if world_size > 1:
            with pytest.raises(ValueError, match="given with its communication, expected format='compute_comms'"):
                again.dump_csv(path)


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_order_of_a_schedule_can_be_read_and_written(world_size: int, tmp_path: Any) -> None:
    run_ranks(_show_orders, world_size, "gloo", folder=str(tmp_path))


def _analyze(rank: int, world_size: int) -> None:
    """What torch counts of a schedule's order is what the simulation holds."""
    from farandole.pipelining import analyze_pipeline_activation_liveness as analyze

    for name in sorted(set(MULTI) - {"DualPipeV"}):  # whose forwards and backwards in one are one position for torch
        made = plan(name, 2 * world_size, 8, num_ranks=world_size)
        placed = [[i for i, owner in enumerate(made.rank_of_stage) if owner == number] for number in range(world_size)]
        stages = [PipelineStage(nn.Linear(2, 2), i, made.num_stages, DEVICE) for i in placed[rank]]
        schedule: Any = get_schedule_class(name)(stages, 8, nn.MSELoss())
        simulated = simulate(made, [(1.0, 2.0, 1.0, 1.0)] * made.num_stages).ranks
        for number, indices in enumerate(placed):
            found = analyze(schedule, pp_rank=number, stage_indices=indices, granularity="stage_microbatch")
            assert found.num_slots == simulated[number].peak_live_activations, name


@pytest.mark.skipif(
    not hasattr(torch.distributed.pipelining, "analyze_pipeline_activation_liveness"), reason="torch 2.15 has it"
)
def test_torch_counts_the_activations_of_a_schedule() -> None:
    run_ranks(_analyze, 2, "gloo")


class _TwoMicrobatches(PipelineScheduleMulti):
    def compute_plan(self, *, forward_only: bool) -> Plan:
        return plan("GPipe", 1, 2, forward_only=forward_only)


def _refuse_counts(rank: int, world_size: int) -> None:
    for n_microbatches in (1, 4):
        stage = PipelineStage(nn.Linear(2, 2), 0, 1, DEVICE)
        ordered = PipelineScheduleMulti([stage], n_microbatches, nn.MSELoss())
        ordered.pipeline_order = {0: ["0F0", "0F1", "0B0", "0B1"]}
        for schedule in (ordered, _TwoMicrobatches([stage], n_microbatches, nn.MSELoss())):
            for step in (schedule.step, schedule.eval):
                with pytest.raises(ValueError, match=f"has 2 microbatches, expected n_microbatches={n_microbatches}"):
                    step(torch.ones(4, 2), target=torch.ones(4, 2))


def test_a_plan_of_another_number_of_microbatches_is_refused() -> None:
    run_ranks(_refuse_counts, 1, "gloo")


class _Always(PipelineScheduleSingle):
    """Has the same plan whatever is asked for."""

    made: Plan

    def compute_plan(self, *, forward_only: bool) -> Plan:
        return self.made


def _refuse_kinds(rank: int, world_size: int) -> None:
    module = nn.Linear(2, 2)
    stage = PipelineStage(module, rank, world_size, DEVICE)
    batch = torch.ones(4, 2)
    forwards = plan("1F1B", world_size, 4, forward_only=True)
    ordered = PipelineScheduleMulti([stage], 4, nn.MSELoss())
    ordered.pipeline_order = {number: [f"{number}F{i}" for i in range(4)] for number in range(world_size)}
    always = _Always(stage, 4, nn.MSELoss())
    always.made = forwards
    for schedule in (ScheduleFromPlan([stage], forwards, nn.MSELoss()), ordered, always):
        with pytest.raises(ValueError, match=r"the plan of \w+ has no backwards, expected some for step\(\)"):
            schedule.step(batch, target=batch)
        losses: list[Any] = []
        schedule.eval(batch, target=batch, losses=losses)
        assert len(losses) == (4 if rank == world_size - 1 else 0)
    always = _Always(stage, 4, nn.MSELoss())
    always.made = plan("1F1B", world_size, 4)
    with pytest.raises(ValueError, match=r"compute_plan\(forward_only=True\) of _Always has backwards, expected none"):
        always.eval(batch, target=batch)
    assert module.weight.grad is None
    always.step(batch, target=batch)
    assert module.weight.grad is not None


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_needs_backwards_and_an_evaluation_has_none(world_size: int) -> None:
    run_ranks(_refuse_kinds, world_size, "gloo")
