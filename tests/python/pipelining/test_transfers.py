"""Messages between stages are measured, and plans are chosen by what they take."""

from __future__ import annotations

import statistics
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.pipelining import (
    PipelineStage,
    Plan,
    Schedule1F1B,
    ScheduleFromPlan,
    ScheduleZBH1,
    StageCosts,
    Transfers,
    auto_plan,
    gather_timeline,
    get_schedule_class,
    measure_transfers,
    plan,
    profile_costs,
    simulate,
)
from pipelining.pipeline_support import BACKENDS
from support.devices import DEVICE, only_on_cpu
from support.hosts import Hosts
from support.processes import run_ranks

DELAY = 0.02  # seconds, of a link in each direction


class _Sleeps(torch.autograd.Function):
    """The identity, for which a forward and a backward take their time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return grad, None


class Slow(nn.Module):
    def __init__(self, width: int, seconds: float):
        super().__init__()
        self.linear, self.seconds = nn.Linear(width, width), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(_Sleeps.apply(x, self.seconds))


def _steps_by(made: Plan, rank: int, count: int = 5) -> float:
    """The median seconds of a step."""
    owned = [i for i, owner in enumerate(made.rank_of_stage) if owner == rank]
    stages = [PipelineStage(Slow(8, 0.005), i, made.num_stages, DEVICE) for i in owned]
    schedule = ScheduleFromPlan(stages, made, nn.MSELoss())
    x, y = torch.randn(made.num_microbatches, 8), torch.randn(made.num_microbatches, 8)
    took = []
    for _ in range(1 + count):
        schedule.step(x, target=y)
        took.append(gather_timeline(schedule).makespan)
    return statistics.median(took[1:])


def _measure(rank: int, world_size: int, width: int, rows: int) -> tuple[StageCosts, str]:
    stage = PipelineStage(Slow(width, 0.005), rank, world_size, DEVICE)
    schedule = ScheduleZBH1(stage, 8, nn.MSELoss())
    for _ in range(2):
        schedule.step(torch.randn(8 * rows, width), target=torch.randn(8 * rows, width))
    costs = profile_costs(gather_timeline(schedule), transfers=measure_transfers(schedule))
    return costs, auto_plan(2, 8, costs).reason


def _choose(rank: int, world_size: int) -> tuple[StageCosts, str, bool, float, float]:
    costs, reason = _measure(rank, world_size, width=8, rows=1)
    made = auto_plan(2, 8, costs)
    assert made.reason == reason
    without = auto_plan(2, 8, costs, transfer=0.0)
    is_other = made.plan.to_csv() != without.plan.to_csv()  # of another schedule, or in another order
    return costs, reason, is_other, _steps_by(made.plan, rank), _steps_by(without.plan, rank)


@only_on_cpu("network namespaces")
def test_over_a_slow_link_messages_take_its_delay_and_another_plan_is_chosen() -> None:
    with Hosts(2, delay=DELAY) as hosts:
        results = run_ranks(_choose, 2, "farandole", timeout=90, enter=hosts.enter((0, 1)))
    costs, reason, is_other, seconds, seconds_without = results[0]
    print(reason, costs.transfers, seconds, seconds_without)
    assert results[1][:2] == results[0][:2], "all ranks know the same"
    for took in costs.transfers.by_edge[0, 1]:
        assert 2 * DELAY <= took < 4 * DELAY  # out of one host, and into the other
    assert "where messages take" in reason
    assert is_other
    assert seconds < 0.9 * seconds_without


@only_on_cpu("network namespaces")
def test_over_a_narrow_link_large_messages_take_as_long_as_it_needs_for_them() -> None:
    with Hosts(2, rate="100mbit") as hosts:
        costs, _ = run_ranks(_measure, 2, "farandole", timeout=90, enter=hosts.enter((0, 1)), width=250, rows=2000)[0]
    expected = 250 * 2000 * 4 / (100e6 / 8)
    for took in costs.transfers.by_edge[0, 1]:
        assert 0.8 * expected < took < 1.7 * expected, (took, expected)


def _measure_graphs(rank: int, world_size: int, case: str) -> Transfers:
    name = {"skip": "1F1B", "loop": "Interleaved1F1B", "v": "ZBV"}[case]
    edges = [(0, 1), (0, 2), (1, 2)] if case == "skip" else None
    num_stages = 3 if case == "skip" else 2 * world_size
    owners = plan(name, num_stages, 4, num_ranks=world_size).rank_of_stage

    class Stage(nn.Linear):
        def forward(self, *given: torch.Tensor) -> torch.Tensor:
            return super().forward(sum(given))  # type: ignore[arg-type]

    stages = [PipelineStage(Stage(4, 4), i, num_stages, DEVICE) for i, owner in enumerate(owners) if owner == rank]
    schedule = get_schedule_class(name)(stages[0] if case == "skip" else stages, 4, nn.MSELoss(), edges=edges)
    with pytest.raises(RuntimeError, match=r"measure_transfers\(\) on ranks \[0, 1.*\] before their first step"):
        measure_transfers(schedule)
    schedule.step(torch.randn(6, 4), target=torch.randn(6, 4))
    transfers = measure_transfers(schedule)
    with pytest.raises((RuntimeError, TypeError)):  # this step has sent nothing
        schedule.step(torch.randn(6, 4), target=torch.randn(6, 4), losses=() if rank == 1 else None)  # type: ignore[arg-type]
    with pytest.raises(
        RuntimeError, match=r"measure_transfers\(\) after a step that failed, expected it after one that"
    ):
        measure_transfers(schedule)
    with pytest.raises(
        RuntimeError, match=r"on ranks \[0, 1.*\] before their first step, or after one that was refused"
    ):
        gather_timeline(schedule)
    with pytest.raises(RuntimeError, match="before the first step, or after one that was refused"):
        schedule.last_step_bubble()
    schedule.step(torch.randn(6, 4), target=torch.randn(6, 4))  # the group is as it was
    assert sorted(measure_transfers(schedule).by_edge) == sorted(transfers.by_edge)
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, transfers)
    assert everyone == [transfers] * world_size
    return transfers


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "world_size"), [("skip", 3), ("loop", 2), ("v", 2)])
def test_messages_over_every_edge_of_any_graph_are_measured(backend: str, case: str, world_size: int) -> None:
    transfers = run_ranks(_measure_graphs, world_size, backend, case=case)[0]
    chain = [(i, i + 1) for i in range(3)]
    assert sorted(transfers.by_edge) == ([(0, 1), (0, 2), (1, 2)] if case == "skip" else chain)
    assert all(0 < seconds < 1 for both in transfers.by_edge.values() for seconds in both)


def _of_one_rank(rank: int, world_size: int) -> None:
    schedule = Schedule1F1B(PipelineStage(nn.Linear(2, 2), 0, 1, DEVICE), 2, nn.MSELoss())
    schedule.step(torch.randn(4, 2), target=torch.randn(4, 2))
    assert measure_transfers(schedule) == Transfers()


def test_one_rank_has_no_messages() -> None:
    run_ranks(_of_one_rank, 1, "gloo")


@only_on_cpu("no tensors")
def test_costs_bring_their_transfers_unless_others_are_given() -> None:
    seconds = [(1.0, 2.0, 1.0, 1.0)] * 3
    transfers = Transfers({(0, 1): (0.25, 0.5), (1, 2): (3.0, 7.0)})
    costs = StageCosts(seconds, transfers)
    made = plan("GPipe", 3, 1)
    assert costs == seconds
    assert simulate(made, costs).makespan == simulate(made, seconds, transfers).makespan == 9 + 10.75
    assert simulate(made, costs, 0.5).makespan == 11
    assert simulate(made, seconds).makespan == 9
    assert "where messages take 250 to 7e+03 ms" in auto_plan(3, 4, costs).reason
    assert auto_plan(3, 4, seconds, transfer=transfers).reason == auto_plan(3, 4, costs).reason
    assert "messages" not in auto_plan(3, 4, costs, transfer=0.0).reason
    with pytest.raises(ValueError, match="transfer over edge 0 -> 1 is -1"):
        simulate(made, seconds, Transfers({(0, 1): (-1.0, 0.0)}))
