"""A forward, backward or step that raises on some ranks only ends the pipeline of all; on all ranks, that batch alone."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from farandole.sparse import EvalPipelineSparseDist, TrainPipelineSparseDist
from support.devices import DEVICE, only_on_cpu
from support.processes import await_all, run_ranks
from support.recommenders import Trouble, assert_same, drain_with_errors, made, make_batches, plain_loop

pytestmark = only_on_cpu("gives up groups of farandole's on CPU")

AT_ONCE = 12.0  # seconds, on a machine that does other things; groups time out after 60


def failing_at(ats: Iterable[int], before: Callable[[], None]) -> Callable[[int], None]:
    def at(number: int) -> None:
        if number in ats:
            before()
            raise Trouble("one bad sample")

    return at


def failing(ats: Iterable[int], before: Callable[[], None] = lambda: None) -> Callable[..., None]:
    """A hook that raises in calls of these numbers."""
    calls, at = iter(range(1000)), failing_at(ats, before)
    return lambda *_: at(next(calls))


def hook(model: Any, optimizer: Any, stage: str, ats: set[int], before: Callable[[], None] = lambda: None) -> None:
    call = failing(ats, before)
    if stage == "forward":  # after the collectives of the lookups
        model.module.dense.register_forward_pre_hook(call)
    elif stage == "before":
        model.register_forward_pre_hook(call)
    elif stage == "arrival":
        # Not by calls: on the pipeline's thread the data of the next batch may come before this one's is waited for.
        model.module.tables[0].before_arrival = failing_at(ats, before)
    elif stage == "backward":
        model.module.dense.register_full_backward_pre_hook(call)
    else:
        optimizer.register_step_pre_hook(call)


def fail_alone(rank: int, world_size: int, seed: int, stage: str, options: dict[str, Any]) -> tuple[list[Any], int]:
    pick = random.Random(seed)
    culprit, number = pick.randrange(world_size), pick.randrange(5)
    print(f"seed {seed}: the {stage} of batch {number} fails on rank {culprit}, {options}")
    model, optimizer = made(seed)
    if rank == culprit:
        hook(model, optimizer, stage, {number})
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, **options)
    batches = iter(make_batches(seed, 9, (4, 5)))  # of one size: what is mixed up fits
    outputs = []
    began = time.monotonic()
    # Others are in that batch, or, where they have ended it, in the next one.
    with pytest.raises((Trouble, RuntimeError)) as raised:
        while True:
            outputs.append(pipeline.progress(batches))
    within = "forward" if stage in ("before", "arrival") else stage
    where = rf"rank {culprit} has failed in the {within} of batch {number}, and rank"
    why = rf"{where} .* has not.*: Trouble: one bad sample"
    if rank == culprit:
        assert isinstance(raised.value, Trouble) and len(outputs) == number
    else:
        assert re.search(why, str(raised.value)), raised.value
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"cannot be used again: {why}"):
            pipeline.progress(batches)
    assert time.monotonic() - began < AT_ONCE
    await_all(rank, world_size)
    return [output.tolist() for output in outputs], number


def check_outputs(rank: int, world_size: int, seed: int, of_ranks: list[Any]) -> None:
    """None of them was made of what belonged to another batch."""
    plain, plain_optimizer = made(seed)
    outputs, number = of_ranks[rank]
    expected = plain_loop(plain, plain_optimizer, make_batches(seed, 9, (4, 5))[: number + 1])
    assert len(outputs) in (number, number + 1)
    assert outputs == [output.tolist() for output in expected[: len(outputs)]]


@pytest.mark.parametrize(
    ("stage", "options"),
    [
        ("before", {}),
        ("arrival", {}),
        ("arrival", {"dist_on_thread": True}),
        ("forward", {"load_on_thread": True, "dist_on_thread": True}),
        ("forward", {"execute_all_batches": False}),
        ("backward", {"agree_on_inputs": True}),
        ("backward", {}),
        ("step", {}),
    ],
)
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_fails_alone_is_told_to_the_others_and_mixes_up_no_batches(stage, options, world_size):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    of_ranks = run_ranks(fail_alone, world_size, "farandole", seed=seed, stage=stage, options=options)
    run_ranks(check_outputs, world_size, "farandole", seed=seed, of_ranks=of_ranks)


def fail_over_gloo(rank: int, world_size: int) -> None:
    """The rank that has failed starts nothing more; the others learn of it when their collectives end, here with it."""
    model, optimizer = made(3)
    if rank == 0:
        hook(model, optimizer, "backward", {2})
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    batches = iter(make_batches(1, 6, (4, 5)))
    for _ in range(2):
        pipeline.progress(batches)
    with pytest.raises((Trouble, RuntimeError)):
        pipeline.progress(batches)
    with pytest.raises(
        RuntimeError, match=r"cannot be used again: rank 0 has failed in the backward of batch 2, and rank 1"
    ):
        pipeline.progress(batches)


def test_over_gloo_a_rank_that_has_failed_alone_starts_nothing_more():
    run_ranks(fail_over_gloo, 2, "gloo", timeout=10)


def fail_in_evaluation(rank: int, world_size: int) -> None:
    model, optimizer = made(3)
    if rank == 1:
        hook(model, optimizer, "forward", {1})
    pipeline = EvalPipelineSparseDist(model, optimizer, DEVICE)
    batches = iter(make_batches(1, 6))
    with pytest.raises((Trouble, RuntimeError)):
        for _ in range(4):
            pipeline.progress(batches)
    with pytest.raises(
        RuntimeError, match=r"cannot be used again: rank 1 has failed in the forward of batch 1, and rank 0"
    ):
        pipeline.progress(batches)
    await_all(rank, world_size)


def test_so_it_is_in_an_evaluation():
    run_ranks(fail_in_evaluation, 2, "farandole")


def fail_at_the_end(rank: int, world_size: int) -> None:
    """The last batch, which no exchange follows; the step of a window that the end of the data cuts short."""
    model, optimizer = made(3)
    if rank == 0:
        hook(model, optimizer, "step", {1})
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, grad_accum=2)
    batches = iter(make_batches(1, 3))
    for _ in range(3):
        pipeline.progress(batches)
    # The other one has had its step.
    with pytest.raises(Trouble if rank == 0 else StopIteration):
        pipeline.progress(batches)
    if rank == 0:
        with pytest.raises(RuntimeError, match=r"cannot be used again.*the step of the window that the end"):
            pipeline.progress(batches)
    await_all(rank, world_size)


def test_so_it_is_at_the_end_of_the_data():
    run_ranks(fail_at_the_end, 2, "farandole")


def fail_late(rank: int, world_size: int, stage: str) -> None:
    """Twice on all ranks, on one of them later than on the others."""
    (model, optimizer), (plain, plain_optimizer) = made(3), made(3)
    hook(model, optimizer, stage, {1, 3}, lambda: time.sleep(0.6 * rank))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    batches = make_batches(1, 6)
    seen = drain_with_errors(pipeline, iter(batches))
    assert [index for index, output in enumerate(seen) if isinstance(output, Trouble)] == [1, 3]
    expected = plain_loop(plain, plain_optimizer, [batches[index] for index in (0, 2, 4, 5)])
    assert all(map(torch.equal, [seen[index] for index in (0, 2, 4, 5)], expected))
    assert_same(model, plain)
    store = torch.distributed.distributed_c10d._get_default_store()
    name = pipeline._attachment.input_dist._joint.exchange.name
    torch.distributed.barrier()
    assert not store.check([f"{name}/failed/1/{rank}"])


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
@pytest.mark.parametrize("stage", ["forward", "step"])
def test_ranks_that_all_fail_go_on_though_some_are_later(stage, backend):
    run_ranks(fail_late, 2, backend, stage=stage)


def fail_apart(rank: int, world_size: int) -> None:
    """Each in another stage, behind its last collective."""
    model, optimizer = made(3)
    if rank == 0:
        hook(model, optimizer, "step", {1})
    else:
        model.module.tables[0].table.register_hook(failing({1}))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    batches = iter(make_batches(1, 6))
    pipeline.progress(batches)
    with pytest.raises(Trouble):
        pipeline.progress(batches)
    with pytest.raises(RuntimeError, match=r"cannot be used again: rank \d has failed in the .*, and rank \d in the "):
        pipeline.progress(batches)
    await_all(rank, world_size)


def test_ranks_that_fail_in_different_stages_are_out_of_step():
    run_ranks(fail_apart, 2, "farandole")
