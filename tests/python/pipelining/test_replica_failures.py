"""A rank of a 2 x 2 grid (stages x replicas) fails in a step: all four raise at once and name it."""

from __future__ import annotations

import datetime
import itertools
import math
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.ddp import DistributedDataParallel
from farandole.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from pipelining.pipeline_support import BACKENDS
from support.devices import DEVICE, ON_CPU, only_on_cpu
from support.processes import run_ranks

STAGES, REPLICAS, MICROBATCHES = 2, 2, 4
RANKS = STAGES * REPLICAS
GROUP_TIMEOUT = 60.0
RUN_TIMEOUT = GROUP_TIMEOUT if ON_CPU else 150.0
AT_ONCE = 5.0 if ON_CPU else 30.0  # seconds, on a machine with fewer cores than ranks; NCCL connects in them
# Those over which who waits is told that a rank has given up.
TELLING = [
    pytest.param("gloo", marks=only_on_cpu("torch's NCCL ends processes that wait for one that gave up")),
    *BACKENDS[1:],
]


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ArithmeticError("it broke in backward")


class _Stage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.fail_in, self.fail_at, self.calls = "", -1, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fails = self.fail_in if self.calls == self.fail_at else ""
        self.calls += 1
        if fails == "forward":
            raise ValueError("it broke in forward")
        x = self.second(x)
        return self.first(_Raises.apply(x) if fails == "backward" else x)


class _Loss:
    def __init__(self) -> None:
        self.fail_at, self.calls = -1, 0

    def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls - 1 == self.fail_at:
            raise KeyError("it broke in loss")
        return nn.functional.mse_loss(x, y)


class _Grid:
    """This rank's place in a fresh grid: its own groups, since a failure ends those of data parallelism."""

    def __init__(self, schedule_class: type, rank: int, wrap: type = DistributedDataParallel, **options) -> None:
        self.rank, self.stage_index, self.replica = rank, rank % STAGES, rank // STAGES
        timeout = datetime.timedelta(seconds=GROUP_TIMEOUT)
        pipelines = [[r * STAGES + s for s in range(STAGES)] for r in range(REPLICAS)]
        replicas = [[r * STAGES + s for r in range(REPLICAS)] for s in range(STAGES)]
        pipeline = [dist.new_group(ranks, timeout=timeout) for ranks in pipelines][self.replica]
        group = [dist.new_group(ranks, timeout=timeout) for ranks in replicas][self.stage_index]
        torch.manual_seed(self.stage_index)
        self.module, self.loss = _Stage(), _Loss()
        self.wrapped = wrap(self.module, process_group=group, **options)
        stage = PipelineStage(self.wrapped, self.stage_index, STAGES, DEVICE, group=pipeline)
        self.schedule = schedule_class(stage, MICROBATCHES, self.loss)
        self.batch, self.target = torch.randn(2, 2 * MICROBATCHES, 4)

    def step(self) -> tuple[BaseException | None, float]:
        start = time.monotonic()
        try:
            self.schedule.step(self.batch, target=self.target)
        except (RuntimeError, ValueError) as error:
            return error, time.monotonic() - start
        return None, time.monotonic() - start

    def fail(self, fail_in: str, microbatch: int) -> None:
        if fail_in == "loss":
            self.loss.calls, self.loss.fail_at = 0, microbatch
        else:
            self.module.calls, self.module.fail_in, self.module.fail_at = 0, fail_in, microbatch


def _fail_everywhere(rank: int, world_size: int, fail_in: str, every: int) -> list[tuple[object, str, str, float]]:
    seen = []
    failing_ranks = [each for each in range(RANKS) if fail_in != "loss" or each % STAGES == STAGES - 1]
    schedules, steps = (ScheduleGPipe, Schedule1F1B), (0, MICROBATCHES - 1)
    cases = itertools.product(failing_ranks, schedules, (False, True), steps)
    for failing, schedule_class, learned, microbatch in itertools.islice(cases, 0, None, every):
        where = (failing, schedule_class.__name__, learned, microbatch)
        grid = _Grid(schedule_class, rank, bucket_size=1)
        if learned:
            assert grid.step()[0] is None, where
        if rank == failing:
            grid.fail(fail_in, microbatch)
        dist.barrier()
        error, seconds = grid.step()
        again, seconds_again = grid.step()
        seen.append((where, repr(error), repr(again), max(seconds, seconds_again)))
    dist.barrier()  # nobody leaves while others still look: that would end their waits as well
    return seen


@pytest.mark.sample(4)
@pytest.mark.parametrize("fail_in", ["forward", "backward", "loss"])
@pytest.mark.parametrize("backend", TELLING)
def test_a_failure_of_one_rank_reaches_all_stages_of_all_replicas_at_once(backend: str, fail_in: str) -> None:
    every = 5 if backend == "gloo" or not ON_CPU else 1  # gloo's groups take a second to end, NCCL's to begin
    results = run_ranks(_fail_everywhere, RANKS, backend, timeout=RUN_TIMEOUT + 60, fail_in=fail_in, every=every)
    assert len(results[0]) == math.ceil(8 * (2 if fail_in == "loss" else 4) / every)
    for rank, seen in enumerate(results):
        for where, error, again, seconds in seen:
            failing, _, _, microbatch = where
            place, stage = failing // STAGES, failing % STAGES
            named = f"rank {stage}" if stage == failing else f"rank {stage} (global rank {failing})"
            part = "backward" if fail_in == "backward" else "forward"  # the loss belongs to the last forward
            context = (rank, where, error)
            assert error.startswith("RuntimeError"), context
            assert f"{named}, stage {stage}, microbatch {microbatch}: {part}: " in error, context
            assert f"it broke in {fail_in}" in error, context
            # Replicas have it by the group. One that is slow may tell the failing pipeline's other stages in turn.
            abandoned = error.find("abandoned the data-parallel group")
            assert abandoned >= 0 or rank // STAGES == place, context
            assert rank // STAGES != place or abandoned < 0 or error.index(f"{named}, stage") < abandoned, context
            assert again.startswith("RuntimeError"), (rank, where, again)
            assert "of the group cannot average gradients any more: rank " in again, (rank, where, again)
            assert seconds < AT_ONCE, (seconds, context)


def _fail_under_torch(rank: int, world_size: int, failing: int) -> tuple[str, float]:
    grid = _Grid(Schedule1F1B, rank, nn.parallel.DistributedDataParallel)
    assert grid.step()[0] is None
    if rank == failing:
        grid.fail("backward", 0)
    dist.barrier()
    error, seconds = grid.step()
    dist.barrier()
    return repr(error), seconds


# Over gloo, which has no abort, torch's wrapper waits until the group's timeout.
@pytest.mark.sample(2)
@pytest.mark.skipif("farandole" not in BACKENDS, reason="needs the backend farandole")
@only_on_cpu("torch's wrapper does not wait for GPUs on the host")
@pytest.mark.parametrize("failing", range(RANKS))
def test_replicas_wrapped_by_torch_raise_at_once_over_farandole(failing: int) -> None:
    results = run_ranks(_fail_under_torch, RANKS, "farandole", timeout=RUN_TIMEOUT, failing=failing)
    for rank, (error, seconds) in enumerate(results):
        assert error.startswith("RuntimeError"), (rank, error)
        if rank // STAGES == failing // STAGES:
            assert "it broke in backward" in error, (rank, error)
        else:  # the backend knows the rank that gave up, by its number in the group, and not why
            number = "" if failing == failing // STAGES else f"global rank {failing}, "
            assert f"rank {failing // STAGES} ({number}host " in error, (rank, error)
            assert "aborted the group" in error, (rank, error)
        assert seconds < AT_ONCE, (rank, seconds)


def _refuse_arguments(rank: int, world_size: int) -> None:
    grid = _Grid(ScheduleGPipe, rank)
    assert grid.step()[0] is None
    batch, grid.batch = grid.batch, grid.batch[: MICROBATCHES - 1]
    error, _ = grid.step()
    assert "the step cannot run" in str(error) or "expected at least n_microbatches" in str(error), error
    grid.batch = batch
    assert grid.step()[0] is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_arguments_that_all_replicas_refuse_leave_the_groups_usable(backend: str) -> None:
    run_ranks(_refuse_arguments, RANKS, backend, timeout=RUN_TIMEOUT)


def _repeat_with_new_groups(rank: int, world_size: int) -> None:
    grid = _Grid(Schedule1F1B, rank)
    if rank == 0:
        grid.fail("forward", 1)
    dist.barrier()  # who gives up ends the others' operations: those of the construction are to be over
    assert grid.step()[0] is not None
    dist.barrier()
    for parameter in grid.module.parameters():
        parameter.grad = None
    again = _Grid(Schedule1F1B, rank)
    assert again.step()[0] is None
    dist.barrier()


@pytest.mark.parametrize("backend", TELLING)
def test_the_step_runs_again_with_new_groups(backend: str) -> None:
    run_ranks(_repeat_with_new_groups, RANKS, backend, timeout=GROUP_TIMEOUT)
