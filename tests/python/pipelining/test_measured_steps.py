"""A measured step, gathered from all ranks, agrees with the plan, with cause and effect, and with the simulator."""

from __future__ import annotations

import itertools
import re
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole import _C, _clocks
from farandole.pipelining import (
    PipelineStage,
    Schedule1F1B,
    draw_svg,
    gather_timeline,
    plan,
    profile_costs,
    simulate,
)
from pipelining.pipeline_support import BACKENDS
from pipelining.step_support import is_compute, prepare_pauses, random_costs, random_plans, seeded_random
from pipelining.test_trace import BACKWARD, FORWARD, Slow
from support.devices import DEVICE, ON_CPU, only_on_cpu
from support.processes import run_ranks


def _measure(rank: int, world_size: int):
    prepare_pauses(rank, world_size)
    schedule = Schedule1F1B(PipelineStage(Slow(), rank, world_size, DEVICE), 5, nn.MSELoss())
    schedule.times_device = True
    with pytest.raises(RuntimeError, match=r"on ranks \[0, 1, 2\] before their first step"):
        gather_timeline(schedule)
    batch, target = torch.randn(5, 2), torch.randn(5, 2)
    for _ in range(3):  # shapes are learned, ranks connected
        schedule.step(batch, target=target)
    time.sleep(0.05 * rank)  # when it is asked for makes no difference
    measured = gather_timeline(schedule)
    predicted = simulate(schedule.plan(), profile_costs(measured))
    draw_svg({"predicted": predicted, "measured": measured})
    times = [one.actions for one in measured.ranks]
    return schedule.plan().actions, times, profile_costs(measured), predicted.makespan, measured.makespan


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gathered_step_is_one_on_all_ranks_and_follows_cause_and_effect(backend: str) -> None:
    results = run_ranks(_measure, 3, backend)
    assert all(result[1:] == results[0][1:] for result in results)
    actions, ranks, costs, predicted, measured = results[0]
    assert [[action for action, _, _ in rank] for rank in ranks] == actions
    assert min(start for rank in ranks for _, start, _ in rank) < FORWARD
    assert max(end for rank in ranks for _, _, end in rank) == measured
    # A rank may be held up between looking at the clock and beginning, and GPUs that ranks share take turns.
    slack, least, most = (0.005, 1.0, 2.0) if ON_CPU else (0.03, 0.8, 4.0)
    when = {action: (start, end) for rank in ranks for action, start, end in rank}
    for (before, after), microbatch in itertools.product(itertools.pairwise(range(3)), range(5)):
        assert when[f"{before}F{microbatch}"][1] <= when[f"{after}F{microbatch}"][0] + slack
        assert when[f"{after}B{microbatch}"][1] <= when[f"{before}B{microbatch}"][0] + slack
    for forward, backward, of_input, of_weights in costs:
        assert least * FORWARD <= forward < most * FORWARD and least * BACKWARD <= backward < most * BACKWARD
        assert (of_input, of_weights) == (backward / 2, backward / 2)  # not run, estimated
    assert predicted * 0.98 * least < measured < predicted * 0.75 * most


def _offset_of_shifted_clocks(rank: int, world_size: int) -> tuple[float, float]:
    device = torch.device(DEVICE)
    shared = _clocks.clock_offset(dist.group.WORLD, device)
    _clocks._clock_identity = lambda: f"clock of ranks {rank % 2} and so on"
    real = time.monotonic
    _clocks.time.monotonic = lambda: real() + 1000 * (rank % 2)
    return shared, _clocks.clock_offset(dist.group.WORLD, device)


@pytest.mark.parametrize("backend", BACKENDS)
def test_clocks_of_other_hosts_are_compared_by_messages(backend: str) -> None:
    for rank, (shared, offset) in enumerate(run_ranks(_offset_of_shifted_clocks, 4, backend)):
        assert shared == 0
        assert offset == pytest.approx(1000 * (rank % 2), abs=0.02 if ON_CPU else 0.1)


@only_on_cpu("no tensors")
def test_costs_are_found_again_in_the_steps_that_they_made() -> None:
    rng = seeded_random()
    for described, made in random_plans(rng, each=4):
        given = random_costs(rng, made.num_stages)
        step = simulate(made, given, transfer=0.5)
        measured = _C.measured_step([rank.actions for rank in step.ranks])
        assert measured.makespan == step.makespan and measured.bubble == pytest.approx(step.bubble), described
        texts = [text for rank in made.actions for text in rank if is_compute(text)]
        alone = {re.sub(r"\d+$", "", text) for text in texts if "OVERLAP" not in text}
        if {leaf for text in texts for leaf in re.findall(r"\d+[FBIW]", text)} - alone:
            with pytest.raises(ValueError, match="expected to see each kind alone"):
                profile_costs(measured)
            continue
        found = profile_costs(measured)
        for stage, (costs, expected) in enumerate(zip(found, given, strict=True)):
            kinds = [kind for kind, name in enumerate("FBIW") if f"{stage}{name}" in alone]
            assert kinds, f"{described}: stage {stage}"
            assert [costs[kind] for kind in kinds] == pytest.approx([expected[kind] for kind in kinds]), described
        assert simulate(made, found, 0.5).makespan == pytest.approx(step.makespan), described


@only_on_cpu("no tensors")
def test_costs_are_medians_over_steps_and_what_was_not_run_is_an_error() -> None:
    steps = [_C.measured_step([[("0F0", 0.0, last), ("0F1", last, last + 1)]]) for last in (1.0, 1.5, 9.0)]
    whole = _C.measured_step([[("0F0", 0.0, 1.0), ("0B0", 1.0, 4.0)]])
    assert profile_costs(whole) == [(1.0, 3.0, 1.5, 1.5)]
    halves = _C.measured_step([[("0F0", 0.0, 1.0), ("0I0", 1.0, 2.0), ("0W0", 2.0, 4.0)]])
    assert profile_costs(halves) == [(1.0, 3.0, 1.0, 2.0)]
    assert profile_costs(*steps) == [(1.0, 0.0, 0.0, 0.0)]
    assert profile_costs(steps[1], steps[2]) == [(1.25, 0.0, 0.0, 0.0)]
    with pytest.raises(ValueError, match=r"stage 0 runs \[\]"):
        profile_costs(_C.measured_step([[("1F0", 0.0, 1.0)]]))
    with pytest.raises(ValueError, match=r"stage 0 runs \['F'\] and, not overlapped, \[\]"):
        profile_costs(_C.measured_step([[("(0F1;1B0)OVERLAP_F_B", 0.0, 1.0)]]))
    with pytest.raises(ValueError, match="0F0 lasts from"):
        _C.measured_step([[("0F0", 2.0, 1.0)]])
    assert simulate(plan("GPipe", 1, 1), {"0F0": 1.0, "0B0": 2.0}).makespan == 3
