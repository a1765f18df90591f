"""A rank that gives its data-parallel group up: the others learn at once who did, and why."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import ON_CPU, only_on_cpu
from support.processes import run_ranks

RANKS, CULPRIT = 3, 1
GROUP_TIMEOUT, AT_ONCE = (60, 5.0) if ON_CPU else (120, 20.0)
# Where a rank that gives the group up ends what is under way on the others.
ENDING = [
    pytest.param(
        name,
        marks=[only_on_cpu("torch's NCCL ends processes that wait for one that gave up")] if name == "gloo" else [],
    )
    for name in BACKENDS
]


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise MemoryError("too much")


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.back, self.spare = (torch.nn.Linear(2, 2) for _ in range(3))

    def forward(self, x: torch.Tensor, fail_in: str = "") -> torch.Tensor:
        if fail_in == "forward":
            raise MemoryError("too much")
        x = self.front(x)
        x = self.back(_Raises.apply(x) if fail_in == "backward" else x)
        return (x if fail_in == "unused" else self.spare(x)).square().sum()


def _error_of(body: Callable[[], object]) -> tuple[str, float]:
    start = time.monotonic()
    try:
        body()
    except (RuntimeError, MemoryError) as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", time.monotonic() - start


def _step(model: DistributedDataParallel, fail_in: str = "") -> None:
    with model.abandon_on_error():
        if fail_in == "input":
            raise MemoryError("too much")
        if fail_in == "no_sync":
            with model.no_sync():
                model(torch.ones(2, 2), "forward")
        model(torch.ones(2, 2), fail_in).backward()


def _fail_in_a_step(rank: int, world_size: int, fail_in: str, learned: bool) -> list[tuple[str, float]]:
    group = dist.new_group(list(range(world_size)))  # not the world: the barriers need that
    model = DistributedDataParallel(_Model(), process_group=group, bucket_size=1)
    if learned:
        _step(model)
    dist.barrier()
    first = _error_of(lambda: _step(model, fail_in if rank == CULPRIT else ""))
    second = _error_of(lambda: _step(model))
    with torch.no_grad():
        model(torch.ones(2, 2))  # what needs no group works
    dist.barrier()
    fresh = DistributedDataParallel(model.module, process_group=dist.new_group())
    _step(fresh)
    dist.barrier()
    return [first, second]


@pytest.mark.sample(6)
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("fail_in", ["input", "forward", "backward", "no_sync"])
@pytest.mark.parametrize("backend", ENDING)
def test_an_error_inside_a_guarded_step_ends_the_step_of_all_ranks(backend: str, fail_in: str, learned: bool) -> None:
    results = run_ranks(_fail_in_a_step, RANKS, backend, timeout=GROUP_TIMEOUT, fail_in=fail_in, learned=learned)
    for rank, ((first, seconds), (second, _)) in enumerate(results):
        assert seconds < AT_ONCE, (rank, seconds)
        reason = f"rank {CULPRIT} abandoned the data-parallel group: MemoryError: too much"
        if rank == CULPRIT:
            assert first == "MemoryError: too much"
        else:
            assert first.startswith("RuntimeError"), (rank, first)
            assert reason in first, (rank, first)
        assert "of the group cannot average gradients any more" in second, (rank, second)
        assert reason in second, (rank, second)


def _fail_in_step_with_others(rank: int, world_size: int) -> list[str]:
    model = DistributedDataParallel(_Model())
    error, _ = _error_of(lambda: _step(model, "unused" if rank == CULPRIT else ""))
    _step(model)
    return [error]


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_error_that_leaves_ranks_in_step_abandons_nothing(backend: str) -> None:
    results = run_ranks(_fail_in_step_with_others, RANKS, backend, timeout=GROUP_TIMEOUT)
    for (error,) in results:
        assert f"rank {CULPRIT} of the group" in error
        assert "'spare.weight', 'spare.bias'" in error


def _fail_before_the_gathers(rank: int, world_size: int, overlaps: bool) -> list[tuple[str, float]]:
    model = DistributedDataParallel(
        _Model(),
        process_group=dist.new_group(list(range(world_size))),
        use_distributed_optimizer=True,
        overlap_param_gather=overlaps,
    )
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def train(fails: bool, unused: bool = False) -> None:
        with model.abandon_on_error():
            optimizer.zero_grad()
            model(torch.ones(2, 2), "unused" if unused else "").backward()
            if fails:
                raise MemoryError("too much")
            optimizer.step()

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.ones(2, 2))

    train(False)
    in_step = _error_of(lambda: train(False, unused=rank == CULPRIT))
    after = _error_of(lambda: [train(False), evaluate()])
    dist.barrier()
    # On a GPU gathers are awaited by the device alone: what comes after them fails.
    first = _error_of(lambda: [train(rank == CULPRIT), evaluate(), train(False)])
    dist.barrier()
    return [in_step, after, first]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("backend", ENDING)
def test_an_error_between_backward_and_the_step_of_a_sharded_optimizer_ends_the_wait(
    backend: str, overlaps: bool
) -> None:
    """The others come to gathers that the rank does not come to."""
    results = run_ranks(_fail_before_the_gathers, RANKS, backend, timeout=GROUP_TIMEOUT, overlaps=overlaps)
    for rank, ((in_step, _), (after, _), (first, seconds)) in enumerate(results):
        assert "'spare.weight', 'spare.bias'" in in_step, (rank, in_step)
        assert after == "", (rank, after)
        assert seconds < AT_ONCE, (rank, seconds)
        if rank == CULPRIT:
            assert first == "MemoryError: too much"
        else:
            assert f"rank {CULPRIT} abandoned the data-parallel group: MemoryError: too much" in first, (rank, first)


def _abandon(rank: int, world_size: int) -> list[tuple[str, float]]:
    group = dist.new_group([1, 2])
    if rank == 0:
        dist.barrier()
        return []
    model = DistributedDataParallel(_Model(), process_group=group)
    if rank == 2:
        model.abandon("the disk is full")
        model.abandon("told again")
    errors = [_error_of(lambda: model(torch.ones(2, 2)).backward())]
    for use in (model.start_grad_sync, model.finish_grad_sync):
        errors.append(_error_of(use))
    dist.barrier()
    return errors


@pytest.mark.parametrize("backend", ENDING)
def test_a_rank_that_abandons_is_named_by_group_and_world(backend: str) -> None:
    results = run_ranks(_abandon, RANKS, backend, timeout=GROUP_TIMEOUT)
    for errors in results[1:]:
        for error, seconds in errors:
            assert "rank 1 (global rank 2) abandoned the data-parallel group: the disk is full" in error, error
            assert seconds < AT_ONCE


def test_alone_it_is_no_more_than_an_error_from_then_on() -> None:
    run_ranks(_abandon_alone, 1, "gloo")


def _abandon_alone(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(_Model())
    with pytest.raises(MemoryError):
        _step(model, "backward")
    with pytest.raises(RuntimeError, match="rank 0 abandoned the data-parallel group: MemoryError: too much"):
        _step(model)


def _fail_between_backwards(rank: int, world_size: int) -> list[tuple[str, float]]:
    group = dist.new_group(list(range(world_size)))  # not the world: the barrier needs that
    model = DistributedDataParallel(_Model(), process_group=group)

    def step(fails: bool) -> None:
        with model.abandon_on_error():
            model(torch.ones(2, 2)).backward()
            if fails:
                raise MemoryError("too much")
            model(torch.ones(2, 2)).backward()

    step(False)
    error = _error_of(lambda: step(rank == CULPRIT))
    dist.barrier()
    return [error]


@pytest.mark.parametrize("backend", ENDING)
def test_a_rank_that_fails_between_two_backwards_of_a_step_does_not_leave_the_others_waiting(backend):
    for rank, [(error, seconds)] in enumerate(
        run_ranks(_fail_between_backwards, RANKS, backend, timeout=GROUP_TIMEOUT / 2)
    ):
        assert "MemoryError: too much" in error, (rank, error)
        assert rank == CULPRIT or f"rank {CULPRIT}" in error, (rank, error)
        assert seconds < AT_ONCE, (rank, error, seconds)


def _load_after(rank: int, world_size: int) -> None:
    """Parameters of ranks that had stepped will not come any more; what is loaded is in their place."""
    group, next_group = dist.new_group(), dist.new_group()
    torch.manual_seed(1)
    module = _Model()
    saved = {name: value.clone() for name, value in module.state_dict().items()}
    model = DistributedDataParallel(
        module, process_group=group, use_distributed_optimizer=True, overlap_param_gather=True, bucket_size=10
    )
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def step(raises: bool) -> None:
        with model.abandon_on_error():
            optimizer.zero_grad()
            model(torch.ones(1, 2)).backward()
            if raises:
                raise MemoryError("too much")
            optimizer.step()

    step(False)
    assert _error_of(lambda: step(rank == CULPRIT))[0] or rank != CULPRIT
    module.load_state_dict(saved)
    again = DistributedDataParallel(module, process_group=next_group, use_distributed_optimizer=True)
    for name, value in module.state_dict().items():
        assert torch.equal(value, saved[name]), name
    again(torch.ones(1, 2)).backward()


def test_a_checkpoint_is_loaded_after_an_abandonment():
    run_ranks(_load_after, RANKS, "farandole")
