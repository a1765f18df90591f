"""Every schedule, across processes, trains any graph of stages that hand over anything, as one process does."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from farandole.pipelining import (
    PipelineStage,
    Plan,
    ScheduleFromPlan,
    TiedWeights,
    auto_plan,
    get_schedule_class,
    lower,
    plan,
    schedule_names,
)
from pipelining.graph_support import (
    GraphModel,
    random_model,
    random_pairs,
    step_and_compare,
    two_copies,
)
from pipelining.pipeline_support import BACKENDS
from pipelining.plan_support import CHANNELS, ONE_STAGE, counts_for, random_order, random_owners
from support.devices import DEVICE
from support.processes import run_ranks

# Plans that have no name: stages where a table says.
TABLES = ["any order by a table", "auto_plan by a table"]


def _draw(name: str, rng: random.Random, world_size: int) -> tuple[GraphModel, Plan]:
    """The same on every rank."""
    if name in TABLES:
        num_stages, count = world_size * rng.randint(1, 3), rng.randint(1, 6)
        model = random_model(rng, num_stages, random_pairs(rng, num_stages))
        owners = random_owners(rng, num_stages, world_size)
        if name == TABLES[0]:
            return model, lower(random_order(rng, owners, world_size, count, model.pairs), rng.choice(CHANNELS))
        halves = [(rng.random(), rng.random()) for _ in owners]
        costs = [(rng.random(), one + other, one, other) for one, other in halves]
        return model, auto_plan(
            num_stages, count, costs, num_ranks=world_size, rank_of_stage=owners, edges=model.pairs
        ).plan
    num_stages, count = counts_for(rng, name, world_size, most_microbatches=3 * world_size)
    one = num_stages // 2 if name == "DualPipe" else num_stages
    model = random_model(rng, one, random_pairs(rng, one))
    made = plan(name, num_stages, count, num_ranks=world_size, edges=model.pairs)
    return (two_copies(model) if name == "DualPipe" else model), made


def _tie(model: GraphModel, made: Plan, rng: random.Random, rank: int) -> TiedWeights | None:
    """Two stages share a weight: a parameter where they are on one rank, else a copy on each of two."""
    first, second = sorted(rng.sample(range(made.num_stages), 2))
    owners = [made.rank_of_stage[stage] for stage in (first, second)]
    model.tied = (first, second)
    if owners[0] == owners[1]:
        model.modules[second].gain = model.modules[first].gain
        return None
    model.modules[second].gain.data.fill_(0.5)  # the copy begins with another value
    ends = dist.new_group(sorted(owners))
    if rank not in owners:
        return None
    mine = first if rank == owners[0] else second
    return TiedWeights([model.modules[mine].gain], ends, source=dist.get_group_rank(ends, owners[0]))


def _make(name: str, model: GraphModel, made: Plan, rank: int) -> Any:
    num_stages = made.num_stages
    mine = [
        PipelineStage(model.modules[i], i, num_stages, DEVICE)
        for i, owner in enumerate(made.rank_of_stage)
        if owner == rank
    ]
    if name in (*TABLES, "none"):  # which have no class
        return ScheduleFromPlan(mine, made, nn.MSELoss(), outputs_to=model.selected)
    edges = model.edges if name != "DualPipe" else model.of_one_copy().edges
    given: Any = mine[0] if name in ONE_STAGE else mine[::-1]
    return get_schedule_class(name)(given, made.num_microbatches, nn.MSELoss(), edges=edges)


def _train(rank: int, world_size: int, seed: int, names: list[str]) -> int:
    trained = 0
    for number, name in enumerate(names):
        if name == "DualPipe" and world_size % 2:
            continue
        rng = random.Random(seed + number)
        model, made = _draw(name, rng, world_size)
        tied = None
        if rng.random() < 0.4 and name != "DualPipe" and made.num_stages > 1:
            tied = _tie(model, made, rng, rank)
        context = (
            f"seed {seed + number}, {name}, {made.num_stages} stages, {made.num_microbatches} microbatches, edges "
        )
        context += f"{model.edges}, tied {model.tied}, returns {[module.returns for module in model.modules]}"
        try:
            schedule = _make(name, model, made, rank)
            after = None if tied is None else tied.sum_gradients
            step_and_compare(schedule, model, made, rank, rng, context, steps=4, after_step=after)
        except Exception as error:
            raise AssertionError(f"rank {rank}, {context}") from error
        trained += 1
    return trained


@pytest.mark.sample(3)
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_schedule_trains_any_graph_with_any_values_as_one_process_does(backend: str, world_size: int) -> None:
    seed = random.SystemRandom().randrange(10**9)
    print(f"seed {seed}")
    names = [*schedule_names(), *TABLES]
    trained = run_ranks(_train, world_size, backend, timeout=150, seed=seed, names=names)[0]
    assert trained == len(names) - world_size % 2
