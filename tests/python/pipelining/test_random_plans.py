"""Plans meet the executor, in processes of their own: what is proven trains as one process does, however odd it is, and
what is not is refused on every rank. Nothing hangs.
"""

from __future__ import annotations

import datetime
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.pipelining import PipelineStage, Plan, ScheduleFromPlan, lower, plan
from pipelining.graph_support import (
    GraphModel,
    ended_in,
    random_kwargs,
    random_model,
    random_pairs,
    step_and_compare,
    two_copies,
)
from pipelining.pipeline_support import BACKENDS
from pipelining.plan_support import CHANNELS, Draft, counts_for, mutated, random_plan
from support.devices import DEVICE, ON_CPU
from support.processes import run_ranks

PATIENCE = datetime.timedelta(seconds=30 if ON_CPU else 90)  # a rank that hangs says in which case


def _draw(seed: int, world_size: int) -> tuple[random.Random, GraphModel, Plan]:
    """The same on every rank."""
    rng = random.Random(seed)
    if rng.random() < 0.15 and world_size % 2 == 0:
        one = random_model(rng, world_size, random_pairs(rng, world_size))
        count = counts_for(rng, "DualPipe", world_size, most_microbatches=2 * world_size + 2)[1]
        made = plan("DualPipe", 2 * world_size, count, num_ranks=world_size, edges=one.pairs)
        return rng, two_copies(one), lower(made, rng.choice(CHANNELS))
    num_stages, count = world_size * rng.randint(1, 3), rng.randint(1, 6)
    model = random_model(rng, num_stages, random_pairs(rng, num_stages))
    return rng, model, random_plan(rng, world_size, num_stages, count, model.pairs)


def _schedule(model: GraphModel, draft: Draft, rank: int, group: Any) -> tuple[ScheduleFromPlan, Plan]:
    num_stages = len(draft.owners)
    mine = [
        PipelineStage(model.modules[i], i, num_stages, DEVICE, group=group)
        for i, owner in enumerate(draft.owners)
        if owner == rank
    ]
    made = draft.plan()
    return ScheduleFromPlan(mine, made, nn.MSELoss(), outputs_to=model.selected), made


def _run(model: GraphModel, draft: Draft, rank: int, group: Any, rng: random.Random, context: str) -> str:
    """What became of the plan on this rank: the steps are compared, anything but a refusal is raised."""
    try:
        schedule, made = _schedule(model, draft, rank, group)
    except ValueError as error:
        return f"refused: {error}"
    if draft.pairs is not None and sorted(draft.pairs) != sorted(model.pairs):
        model = random_model(rng, len(draft.owners), draft.pairs)  # the plan is right, of other stages
        schedule, made = _schedule(model, draft, rank, group)
    if len(ended_in(model, made, list(range(made.num_stages)))) > made.num_microbatches:  # an edge less
        with pytest.raises(ValueError, match="expected one last stage for each") as raised:
            schedule.step()
        return f"refused: {raised.value}"
    step_and_compare(schedule, model, made, rank, rng, context)
    return "ran"


def _run_random_plans(rank: int, world_size: int, seed: int, cases: int, changes: int) -> Counter[str]:
    group = dist.new_group(timeout=PATIENCE)
    seen: Counter[str] = Counter()
    for case in range(seed, seed + cases):
        rng, model, made = _draw(case, world_size)
        for change in range(changes + 1):
            draft = Draft.of(made) if change == 0 else mutated(rng, made)
            context = f"seed {case}, change {change} of {world_size} ranks: {draft.text()}"
            try:
                became = _run(model, draft, rank, group, random.Random(case), context)
            except Exception as error:
                raise AssertionError(f"rank {rank}, {context}") from error
            all_became: list[Any] = [None] * world_size
            dist.all_gather_object(all_became, became)
            assert len(set(all_became)) == 1, f"{context}\n{all_became}"
            assert change > 0 or became == "ran", f"{context}\n{became}"
            seen[became.split(":")[0] if change > 0 else "as it was"] += 1
    return seen


@pytest.mark.sample(2)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_changed_plan_is_refused_on_every_rank_or_trains_as_one_process_does(backend: str, world_size: int) -> None:
    seed = random.SystemRandom().randrange(10**9)
    print(f"seed {seed}")
    seen = run_ranks(_run_random_plans, world_size, backend, timeout=150, seed=seed, cases=12, changes=12)[0]
    print(dict(seen))
    assert seen["ran"] >= 10 and seen["refused"] >= 10, seen


def _change_on_one_rank(rank: int, world_size: int, seed: int, cases: int) -> Counter[str]:
    """A rank has another plan than the others: all of them are told, in the step, and the group can be used again."""
    group = dist.new_group(timeout=PATIENCE)
    seen: Counter[str] = Counter()
    for case in range(seed, seed + cases):
        rng, model, made = _draw(case, world_size)
        odd = rng.randrange(world_size)
        draft = mutated(rng, made)
        if draft == replace(Draft.of(made), changes=draft.changes) or not draft.is_a_plan():
            continue  # what is no plan at all is refused before there is a group to tell of it
        context = f"seed {case}, rank {odd} of {world_size}: {draft.text()}"
        mine = draft if rank == odd else Draft.of(made)
        became = ""
        try:
            stages = [
                PipelineStage(model.modules[i], i, made.num_stages, DEVICE, group=group)
                for i, owner in enumerate(made.rank_of_stage)
                if owner == rank
            ]
            schedule = ScheduleFromPlan(stages, mine.plan(), nn.MSELoss(), outputs_to=model.selected)
            batch = torch.randn(2 * made.num_microbatches + 2, model.in_features, dtype=torch.double)
            width = model.modules[-1].linear.out_features
            schedule.step(
                batch,
                target=torch.randn(len(batch), width, dtype=torch.double),
                **random_kwargs(rng, model, len(batch)),
            )
        except (ValueError, RuntimeError) as error:
            became = f"{type(error).__name__}: {error}"
        all_became: list[Any] = [None] * world_size
        dist.all_gather_object(all_became, became)
        assert all(all_became), f"{context}\n{all_became}"
        for other, text in enumerate(all_became):
            if other == odd:
                seen["refused" if text.startswith("ValueError") else "differs"] += 1
            else:
                assert text.startswith("RuntimeError: the step cannot run: ") or "do not run the same step" in text, (
                    context
                )
                assert f"rank {odd}" in text or "do not run the same step" in text, f"{context}\n{text}"
        step_and_compare(
            _schedule(model, Draft.of(made), rank, group)[0], model, made, rank, random.Random(case), context
        )
    return seen


@pytest.mark.sample(2)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_that_is_changed_on_one_rank_is_an_error_of_all(backend: str, world_size: int) -> None:
    seed = random.SystemRandom().randrange(10**9)
    print(f"seed {seed}")
    seen = run_ranks(_change_on_one_rank, world_size, backend, timeout=150, seed=seed, cases=40)[0]
    print(dict(seen))
    assert seen["refused"] >= 5 and seen["differs"] >= 2, seen
