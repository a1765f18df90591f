"""Steps as GPUs ran them, from all ranks on one clock, and what is predicted and planned from their times."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.bench._gpus import Placement, sleep_cycles
from farandole.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleFromPlan,
    ScheduleGPipe,
    auto_plan,
    gather_timeline,
    measure_transfers,
    profile_costs,
    simulate,
)
from gpu.graphs import capture
from support.gpus import needs_gpu, run_on_gpus

pytestmark = [needs_gpu, pytest.mark.timeout(200)]
FORWARD, BACKWARD = 0.01, 0.02
MICROBATCHES = 6
TORCHS = "cpu:gloo,cuda:nccl"


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cycles):
        ctx.cycles = cycles
        torch.cuda._sleep(cycles)
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        torch.cuda._sleep(int(ctx.cycles * BACKWARD / FORWARD))
        return grad.clone(), None


class _Slow(nn.Module):
    """The GPU takes FORWARD and BACKWARD seconds for it, the host next to none."""

    def __init__(self, cycles):
        super().__init__()
        self.linear = nn.Linear(64, 64)
        self.cycles = cycles

    def forward(self, x):
        return _Sleep.apply(self.linear(x), self.cycles)


def _schedule(cls, rank, world_size):
    # Where ranks share a GPU one after another finds out how fast it is.
    for turn in range(world_size):
        if turn == rank:
            cycles = sleep_cycles(FORWARD)
        dist.barrier()
    schedule = cls(PipelineStage(_Slow(cycles).cuda(), rank, world_size, "cuda"), MICROBATCHES, nn.MSELoss())
    return schedule, torch.randn(MICROBATCHES, 64, device="cuda")


def _measure(rank, world_size, cls):
    schedule, batch = _schedule(cls, rank, world_size)
    schedule.times_device = True
    for _ in range(3):
        schedule.step(batch, target=batch)
    measured, transfers = gather_timeline(schedule), measure_transfers(schedule)
    costs = profile_costs(measured, transfers=transfers)
    predicted = simulate(schedule.plan(), costs)
    made = auto_plan(world_size, MICROBATCHES, costs, num_ranks=world_size)
    best = ScheduleFromPlan(schedule._stages, made.plan, nn.MSELoss()).step(batch, target=batch)
    assert (best is None) == (rank != world_size - 1)
    ranks = [one.actions for one in measured.ranks]
    return schedule.plan().actions, ranks, costs, schedule.last_step_bubble(), predicted.makespan, measured.makespan


def test_one_gpu_takes_for_each_action_what_it_sleeps_and_is_never_idle(record_property):
    ((actions, ranks, costs, bubble, predicted, measured),) = run_on_gpus(_measure, Placement(1), cls=ScheduleGPipe)
    record_property("forward, backward, ms", " ".join(f"{seconds * 1e3:.2f}" for seconds in costs[0][:2]))
    record_property("measured / predicted", f"{measured / predicted:.3f}")
    assert [action for action, _, _ in ranks[0]] == actions[0]
    assert costs[0][0] == pytest.approx(FORWARD, rel=0.2) and costs[0][1] == pytest.approx(BACKWARD, rel=0.2)
    assert 0 <= bubble < 0.1
    assert predicted * 0.98 < measured < predicted * 1.1


@pytest.mark.parametrize("backend", ["farandole", TORCHS])
def test_the_gathered_step_is_one_on_all_ranks_and_follows_cause_and_effect(peers, backend, record_property):
    results = run_on_gpus(_measure, peers, cls=Schedule1F1B, backend=backend, timeout=100)
    assert all(result[1] == results[0][1] for result in results)
    actions, ranks, costs, _, predicted, measured = results[0]
    assert [[action for action, _, _ in rank] for rank in ranks] == actions
    when = {action: (start, end) for rank in ranks for action, start, end in rank}
    slack = 0.001  # clocks are compared to tens of microseconds; a host may be held up meanwhile
    for (before, after), microbatch in itertools.product(itertools.pairwise(range(peers.size)), range(MICROBATCHES)):
        assert when[f"{before}F{microbatch}"][1] <= when[f"{after}F{microbatch}"][0] + slack
        assert when[f"{after}B{microbatch}"][1] <= when[f"{before}B{microbatch}"][0] + slack
    assert all(a[1] <= b[1] + 1e-6 for rank in ranks for a, b in itertools.pairwise(rank))
    assert all(forward > 0.5 * FORWARD and backward > 0.5 * BACKWARD for forward, backward, _, _ in costs)
    transfers = costs.transfers.by_edge
    record_property(
        "transfers, us", " ".join(f"{seconds * 1e6:.0f}" for both in transfers.values() for seconds in both)
    )
    record_property("measured / predicted", f"{measured / predicted:.3f}")
    assert all(0 < seconds < 0.1 for both in transfers.values() for seconds in both)
    assert predicted * 0.9 < measured < predicted * 1.6  # ranks that share a GPU compute in turns


def _ask_for_times_that_were_not_noted(rank, world_size):
    schedule = ScheduleGPipe(PipelineStage(nn.Linear(2, 2).cuda(), 0, 1, "cuda"), 1, nn.MSELoss())
    batch = torch.ones(2, 2, device="cuda")
    with pytest.raises(RuntimeError, match=r"on ranks \[0\] before their first step"):
        gather_timeline(schedule)
    schedule.step(batch, target=batch)
    for ask in (schedule.last_step_trace, schedule.last_step_bubble, lambda: gather_timeline(schedule)):
        with pytest.raises(RuntimeError, match="did not note them, expected one after"):
            ask()
    schedule.times_device = True
    schedule.step(batch, target=batch)
    assert [action for action, _, _ in schedule.last_step_trace()] == ["0F0", "0B0"]
    capture(lambda: schedule.step(batch, target=batch))
    with pytest.raises(RuntimeError, match="outside of CUDA graphs"):
        gather_timeline(schedule)


def test_times_that_were_not_noted_are_refused_by_name():
    run_on_gpus(_ask_for_times_that_were_not_noted, Placement(1))
