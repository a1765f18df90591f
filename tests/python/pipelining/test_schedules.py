"""Every schedule trains as one process does, with several stages on a rank and backwards in two halves."""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.pipelining import (
    PipelineScheduleMulti,
    PipelineStage,
    Plan,
    ScheduleFromPlan,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
    auto_plan,
    get_schedule_class,
    lower,
    plan,
    schedule_names,
)
from pipelining.pipeline_support import BACKENDS, MULTI, SINGLE, assert_same_gradients, random_stages, train_alone
from pipelining.plan_support import CHANNELS
from support.devices import DEVICE, only_on_cpu
from support.processes import run_ranks


def _random_counts(rng: random.Random, name: str, num_ranks: int) -> tuple[int, int]:
    """Stages and microbatches that the schedule can run."""
    while True:
        num_stages = num_ranks * (1 if name in SINGLE else rng.randint(1, 3))
        n_microbatches = rng.randint(1, 10)
        try:
            plan(name, num_stages, n_microbatches, num_ranks=num_ranks)
            return num_stages, n_microbatches
        except ValueError:
            continue


def _make(name: str, stages: list[nn.Module], n_microbatches: int, rank: int, world_size: int, **kwargs: Any) -> Any:
    """The schedule over those of `stages` that live on this rank."""
    placed = plan(name, len(stages), n_microbatches, num_ranks=world_size).rank_of_stage
    mine = [PipelineStage(stages[i], i, len(stages), DEVICE) for i, owner in enumerate(placed) if owner == rank]
    given = mine[0] if name in SINGLE else mine[::-1]
    return get_schedule_class(name)(given, n_microbatches, nn.MSELoss(), **kwargs), placed


def _compare(
    schedule: Any, stages: list[nn.Module], owners: list[int], rank: int, n_microbatches: int, context: str
) -> None:
    """Three steps: shapes are learned, known, and others."""
    rows = 0
    for step in range(3):
        if step != 1:
            rows = random.Random(step).randint(n_microbatches, 3 * n_microbatches)
        batch = torch.randn(rows, stages[0][0].in_features, dtype=torch.double)  # random depths make tiny gradients
        with torch.no_grad():
            target = torch.randn_like(nn.Sequential(*stages)(batch))
        for stage in stages:
            stage.zero_grad()
        alone, losses, output = train_alone(copy.deepcopy(stages), nn.MSELoss(), batch, target, n_microbatches)
        mine: list[Any] = ["left over"]
        result = schedule.step(batch, target=target, losses=mine)
        where = f"{context}, step {step}, rank {rank}"
        for index, owner in enumerate(owners):
            if owner == rank:
                # Weights' gradients may come in another order of microbatches.
                assert_same_gradients(stages[index], alone[index], f"{where}, stage {index}", tolerance=1e-9)
        if owners[-1] == rank:
            assert torch.equal(torch.stack(mine), torch.stack(losses)), where
            assert torch.equal(result, output), where
        else:
            assert result is None and mine == ["left over"], where
        evaluated = schedule.eval(batch, target=target)
        assert evaluated is None if owners[-1] != rank else torch.equal(evaluated, output), where


def _train_by_every_schedule(rank: int, world_size: int, seed: int) -> None:
    for number, name in enumerate(SINGLE + MULTI):
        rng = random.Random(seed + number)
        num_stages, n_microbatches = _random_counts(rng, name, world_size)
        context = f"seed {seed + number}, {name}, {num_stages} stages, {n_microbatches} microbatches"
        stages = random_stages(rng, num_stages, torch.double, in_place=True)
        schedule, owners = _make(name, stages, n_microbatches, rank, world_size)
        _compare(schedule, stages, owners, rank, n_microbatches, context)


@pytest.mark.sample(3)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_schedule_trains_as_one_process_does(backend: str, world_size: int) -> None:
    seed = int(time.time()) % 1_000_000 * 100
    print(f"seed {seed}")
    run_ranks(_train_by_every_schedule, world_size, backend, timeout=120, seed=seed)


def _train_with_a_long_warmup(rank: int, world_size: int) -> None:
    stages = random_stages(random.Random(5), world_size, torch.double)
    for warmup in (1, 2):
        schedule, owners = _make("1F1B", stages, 9, rank, world_size, warmup_per_stage=warmup)
        actions = [action for action in schedule.plan().actions[rank] if action.startswith((f"{rank}F", f"{rank}B"))]
        forwards = next(i for i, action in enumerate(actions) if "B" in action)
        assert forwards == warmup * (world_size - rank - 1) + 1
        _compare(schedule, stages, owners, rank, 9, f"warmup_per_stage {warmup}")
    for bad in (0, True, 1.0):
        with pytest.raises(ValueError, match=f"warmup_per_stage is {bad!r}, expected an int of at least 1"):
            _make("1F1B", stages, 9, rank, world_size, warmup_per_stage=bad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_longer_warmup_of_1f1b_trains_as_one_process_does(backend: str) -> None:
    run_ranks(_train_with_a_long_warmup, 3, backend)


@only_on_cpu("no tensors")
def test_every_schedule_has_a_class() -> None:
    assert set(SINGLE + MULTI) | {"none", "DualPipe"} == set(schedule_names())
    for name in [*SINGLE, *MULTI, "DualPipe"]:
        assert get_schedule_class(name.lower()).schedule_name == name
    with pytest.raises(ValueError, match=r"schedule_name is 'GPype', expected one of 1F1B, "):
        get_schedule_class("GPype")


def _run_plans(rank: int, world_size: int, folder: str) -> None:
    stages = random_stages(random.Random(3), 4, torch.double)
    theirs = plan("ZBV", 4, 6, num_ranks=2)

    def mine(made: Plan) -> list[PipelineStage]:
        owned = enumerate(made.rank_of_stage)
        return [PipelineStage(stages[i], i, 4, DEVICE) for i, owner in owned if owner == rank]

    chosen = auto_plan(4, 6, [(1.0, 2.0, 1.0, 1.0)] * 4, num_ranks=2).plan
    for made in (theirs, lower(theirs, CHANNELS[0]), lower(theirs, "one_queue_per_rank"), chosen):
        schedule = ScheduleFromPlan(mine(made), made, nn.MSELoss())
        _compare(schedule, stages, made.rank_of_stage, rank, 6, "a plan")

    class Ordered(PipelineScheduleMulti):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.pipeline_order = {number: [None, *row] for number, row in enumerate(theirs.actions)}

    _compare(Ordered(mine(theirs), 6, nn.MSELoss()), stages, theirs.rank_of_stage, rank, 6, "pipeline_order")

    class Validated(PipelineScheduleMulti):
        """As torch's own subclasses are written."""

        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            for number, row in enumerate(theirs.actions):
                self.pipeline_order[number] = [None, *row]
            self._validate_and_set_stage_mapping(self.pipeline_order)

    _compare(Validated(mine(theirs), 6, nn.MSELoss()), stages, theirs.rank_of_stage, rank, 6, "a validated order")
    validated = Validated(mine(theirs), 6, nn.MSELoss())
    with pytest.raises(ValueError, match="is missing"):
        validated._validate_and_set_stage_mapping({0: theirs.actions[0], 1: theirs.actions[1][:-1]})

    for number, made in enumerate((theirs, lower(theirs, CHANNELS[0]))):
        path = f"{folder}/{rank}.{number}.csv"
        with open(path, "w") as file:
            file.write(made.to_csv())
        schedule = PipelineScheduleMulti(mine(made), 6, nn.MSELoss())
        formats = ["compute_only", "compute_comms"]
        with pytest.raises(ValueError, match="communication, expected it with"):
            schedule.load_csv(path, formats[1 - number])
        schedule.load_csv(path, formats[number])
        _compare(schedule, stages, made.rank_of_stage, rank, 6, formats[number])
    with pytest.raises(ValueError, match="the plan has 6 microbatches, expected n_microbatches=5"):
        PipelineScheduleMulti(mine(theirs), 5, nn.MSELoss()).load_csv(path, "compute_comms")


@pytest.mark.parametrize("backend", BACKENDS)
def test_plans_of_the_users_run(backend: str, tmp_path: Any) -> None:
    run_ranks(_run_plans, 2, backend, folder=str(tmp_path))


def _load_what_torch_wrote(rank: int, world_size: int, folder: str) -> None:
    """Compiles torch's own schedules over its own stages, for nothing but their CSV."""
    from torch.distributed import pipelining as theirs

    stages = random_stages(random.Random(3), 4, torch.double)
    for name in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"):
        placed = [0, 1, 1, 0] if "ZBV" in name else [0, 1, 0, 1]
        indices = [i for i, owner in enumerate(placed) if owner == rank]
        made = [theirs.PipelineStage(stages[i], i, 4, torch.device(DEVICE)) for i in indices]
        schedule = getattr(theirs, name)(made, 6, nn.MSELoss())
        for format in ("compute_only", "compute_comms"):
            path = f"{folder}/{name}.{format}.{rank}.csv"
            schedule._dump_csv(path, format)
            ours = PipelineScheduleMulti([PipelineStage(stages[i], i, 4, DEVICE) for i in indices], 6, nn.MSELoss())
            ours._load_csv(path, format)
            _compare(ours, stages, placed, rank, 6, f"{name}, {format}")


def test_what_torch_writes_as_csv_runs(tmp_path: Any) -> None:
    run_ranks(_load_what_torch_wrote, 2, "gloo", folder=str(tmp_path))


def _refuse_stages(rank: int, world_size: int) -> None:
    stages = random_stages(random.Random(3), 4, torch.double)
    wrong = [PipelineStage(stages[i], i, 4, DEVICE) for i in (rank, rank + 2)]
    expected = [rank, 3 - rank]
    with pytest.raises(ValueError, match=rf"stage_index is \[{rank}, {rank + 2}\], expected \[{min(expected)}, "):
        ScheduleZBVZeroBubble(wrong, 4, nn.MSELoss())
    with pytest.raises(ValueError, match=rf"stages have the indices \[{rank}, {rank}\], expected each stage once"):
        ScheduleInterleaved1F1B([wrong[0], wrong[0]], 4)
    with pytest.raises(TypeError, match=r"stages is \[\], expected a list of at least one"):
        ScheduleInterleaved1F1B([], 4)
    with pytest.raises(TypeError, match=r"stages\[1\] is a Linear, expected a farandole.pipelining.PipelineStage"):
        ScheduleInterleaved1F1B([wrong[0], nn.Linear(1, 1)], 4)
    with pytest.raises(RuntimeError, match="has no plan, expected pipeline_order, load_csv"):
        PipelineScheduleMulti(wrong, 4).eval(torch.ones(4, 1))


def test_wrong_stages_are_refused_with_what_is_expected() -> None:
    run_ranks(_refuse_stages, 2, "gloo")


class _Undecided(ScheduleInterleaved1F1B):
    """Makes another plan, and none on rank 1 for the first step."""

    attempts = 0

    def compute_plan(self, *, forward_only: bool) -> Plan:
        type(self).attempts += 1
        if self._stages[0].group_rank == 1 and type(self).attempts == 2:  # the first is the constructor's
            raise OSError("no plan today")
        return plan("LoopedBFS", 4, 4, num_ranks=2, forward_only=forward_only)


def _plan_late(rank: int, world_size: int) -> None:
    stages = random_stages(random.Random(3), 4, torch.double)
    mine = [PipelineStage(stages[i], i, 4, DEVICE) for i in (rank, rank + 2)]
    schedule = _Undecided(mine, 4, nn.MSELoss())
    schedule._lowered.clear()
    with pytest.raises(OSError if rank == 1 else RuntimeError, match="no plan today"):
        schedule.step(torch.ones(4, stages[0][0].in_features), target=torch.ones(4, 1))
    _compare(schedule, stages, [0, 1, 0, 1], rank, 4, "after a step without a plan")

    named = ScheduleInterleaved1F1B(mine, 4, nn.MSELoss())
    named.pipeline_order = dict(enumerate(plan("LoopedBFS", 4, 4, num_ranks=2).actions))
    assert named.plan() == lower(plan("LoopedBFS", 4, 4, num_ranks=2), CHANNELS[0])
    _compare(named, stages, [0, 1, 0, 1], rank, 4, "pipeline_order of a schedule with a name")

    # What is frozen between two steps changes what has a gradient.
    for frozen in (True, False):
        stages[0].requires_grad_(not frozen)
        _compare(named, stages, [0, 1, 0, 1], rank, 4, f"the first stage frozen: {frozen}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_that_one_rank_cannot_make_is_an_error_on_all_and_another_may_follow(backend: str) -> None:
    run_ranks(_plan_late, 2, backend)


class _Failing(nn.Module):
    """Raises in the forward, in the inputs' backward or in the weights' backward of its nth microbatch."""

    def __init__(self, part: str, microbatch: int):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.part, self.microbatch, self.count = part, microbatch, 0
        if part == "weights":
            self.linear.weight.register_hook(self._maybe)

    def _maybe(self, grad: torch.Tensor) -> torch.Tensor:
        if self.count == self.microbatch:
            self.count += 1
            raise ValueError(f"broken {self.part}")
        self.count += 1
        return grad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.part == "forward":
            self._maybe(x)
        y = torch.tanh(self.linear(x))
        if self.part == "inputs":
            y.register_hook(self._maybe)
        return y


def _fail_in_parts(rank: int, world_size: int) -> None:
    for part in ("forward", "inputs", "weights"):
        for name in ("ZBV", "InterleavedZeroBubble", "DualPipeV"):
            torch.manual_seed(1)
            stages: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8)) for _ in range(4)]
            broken = _Failing(part, 2)
            stages[2] = broken
            schedule, owners = _make(name, stages, 4, rank, world_size)
            batch, target = torch.randn(8, 8), torch.randn(8, 8)
            where = f"rank {owners[2]}, stage 2, microbatch \\d: .*ValueError: broken {part}"
            with pytest.raises(RuntimeError, match=where) as caught:
                schedule.step(batch, target=target)
            assert (caught.value.__cause__ is not None) == (owners[2] == rank), (part, name)
            for stage in stages:
                stage.zero_grad()
            broken.count = 100
            alone, _, _ = train_alone(copy.deepcopy(stages), nn.MSELoss(), batch, target, 4)
            broken.count = 100
            schedule.step(batch, target=target)
            for index, owner in enumerate(owners):
                if owner == rank:
                    assert_same_gradients(stages[index], alone[index], (part, name, index), tolerance=2e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_failure_in_any_half_reaches_all_ranks_and_the_next_step_runs(backend: str) -> None:
    run_ranks(_fail_in_parts, 2, backend)


def _ddp_over_pipelines(rank: int, world_size: int, wrapper: str) -> None:
    """Two replicas of a pipeline of two ranks: gradients are the average of both."""
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    from farandole.ddp import DistributedDataParallel as OurDDP

    replica, place = divmod(rank, 2)
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    for name in ("ZB-H1", "ZBV", "InterleavedZeroBubble", "DualPipeV"):
        torch.manual_seed(1)
        count = 2 if name in SINGLE else 4
        stages: list[nn.Module] = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(count)]
        owners = plan(name, count, 4, num_ranks=2).rank_of_stage
        batches = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(2)]
        alone = [train_alone(copy.deepcopy(stages), nn.MSELoss(), *batch, 4)[0] for batch in batches]
        wrap = TorchDDP if wrapper == "torch" else OurDDP
        mine = {i: wrap(stages[i], process_group=replicas[place]) for i, owner in enumerate(owners) if owner == place}
        made = [PipelineStage(module, i, count, DEVICE, group=pipelines[replica]) for i, module in mine.items()]
        schedule = get_schedule_class(name)(made[0] if name in SINGLE else made, 4, nn.MSELoss())
        batch, target = batches[replica]
        for _ in range(2):
            for module in mine.values():
                module.zero_grad()
            schedule.step(batch, target=target)
            for index in mine:
                for (label, parameter), one, other in zip(
                    stages[index].named_parameters(),
                    alone[0][index].parameters(),
                    alone[1][index].parameters(),
                    strict=True,
                ):
                    expected = (one.grad + other.grad) / 2
                    where = f"{name}, stage {index}, {label}"
                    assert torch.allclose(parameter.grad, expected, rtol=1e-4, atol=1e-6), where


@pytest.mark.sample(2)
@pytest.mark.parametrize("wrapper", ["torch", "farandole"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_replicas_reduce_once_after_the_last_half(backend: str, wrapper: str) -> None:
    run_ranks(_ddp_over_pipelines, 4, backend, wrapper=wrapper)
