"""flush(): what is in flight is computed, and the window that is open is stepped; as the plain loop."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from farandole.sparse import EvalPipelineSparseDist, TrainPipelineBase, TrainPipelineSparseDist
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import (
    Loader,
    Mean,
    Trouble,
    are_same,
    assert_same,
    drain,
    made,
    make_batches,
    on_device,
    plain_loop,
)


def flush(rank: int, world_size: int, seed: int, kind: Any, execute_all_batches: bool, threads: bool | None) -> None:
    """At the end of an iterator, and in the middle of one, which goes on."""
    pick = random.Random(seed)
    grad_accum = pick.randint(1, 4)
    (model, optimizer), (plain, plain_optimizer) = made(seed), made(seed)
    pipeline = kind(
        model, optimizer, DEVICE, execute_all_batches=execute_all_batches, grad_accum=grad_accum, load_on_thread=threads
    )
    for epoch in range(5):
        number = pick.randint(0, 7)
        steps = pick.randint(0, number)
        print(f"seed {seed}, epoch {epoch}: {number} batches, grad_accum {grad_accum}, flushed after {steps} steps")
        batches = make_batches(seed + epoch, number)
        iterator = iter(batches)
        outputs: list[torch.Tensor] = []
        try:
            while len(outputs) < steps:
                outputs.append(pipeline.progress(iterator))
        except StopIteration:
            pass
        outputs += pipeline.flush()
        assert pipeline.in_flight == 0 and pipeline.unused_batches == []
        first = len(outputs)
        outputs += drain(pipeline, iterator)
        outputs += pipeline.flush()
        expected = plain_loop(plain, plain_optimizer, batches[:first], grad_accum)
        expected += plain_loop(plain, plain_optimizer, batches[first:], grad_accum)
        assert len(outputs) == number and all(map(torch.equal, outputs, expected))
        assert_same(model, plain)
        assert pipeline.flush() == []


@pytest.mark.sample(6)
@pytest.mark.parametrize("threads", [False, True, None])
@pytest.mark.parametrize("execute_all_batches", [True, False])
@pytest.mark.parametrize("kind", [TrainPipelineSparseDist, TrainPipelineBase])
def test_what_is_in_flight_is_computed_and_the_window_stepped(kind, execute_all_batches, threads):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    options = {"kind": kind, "execute_all_batches": execute_all_batches, "threads": threads}
    run_ranks(flush, 2, "farandole", timeout=90, seed=seed, **options)


def flush_unevenly(rank: int, world_size: int, kind: Any) -> None:
    (model, optimizer), (plain, plain_optimizer) = made(), made()
    pipeline = kind(model, optimizer, DEVICE, execute_all_batches=False, grad_accum=4)
    batches = make_batches(1, 6 + rank)
    iterator = iter(batches)
    outputs = drain(pipeline, iterator) + pipeline.flush()
    assert are_same([*pipeline.unused_batches, *iterator], batches[6:])
    expected = plain_loop(plain, plain_optimizer, batches[:6], 4)
    assert len(outputs) == 6 and all(map(torch.equal, outputs, expected))
    assert_same(model, plain)
    assert pipeline.in_flight == 0


@pytest.mark.parametrize("kind", [TrainPipelineSparseDist, TrainPipelineBase])
def test_ranks_with_other_numbers_in_flight_compute_the_fewest(kind):
    run_ranks(flush_unevenly, 3, "farandole", kind=kind)


def flush_evaluation(rank: int, world_size: int) -> None:
    """Windows of training stay open."""
    (model, optimizer), (plain, plain_optimizer) = made(), made()
    train = TrainPipelineSparseDist(model, optimizer, DEVICE, grad_accum=3, execute_all_batches=False)
    evaluation = EvalPipelineSparseDist(model, optimizer, DEVICE, execute_all_batches=False)
    batches, others = make_batches(1, 6), make_batches(2, 4)
    iterator = iter(batches)
    outputs = [train.progress(iterator)]
    model.eval()
    assert len(evaluated := drain(evaluation, iter(others)) + evaluation.flush()) == 4
    with torch.no_grad():
        assert all(map(torch.equal, evaluated, [model(on_device(batch))[1] for batch in others]))
    model.train()
    outputs += drain(train, iterator) + train.flush()
    assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, batches, 3)))
    assert_same(model, plain)


def test_an_evaluation_is_flushed_and_leaves_windows_alone():
    run_ranks(flush_evaluation, 2, "farandole")


@pytest.mark.parametrize("execute_all_batches", [True, False])
def test_an_error_comes_out_and_another_call_goes_on(execute_all_batches):
    model = Mean().to(DEVICE)
    pipeline = TrainPipelineBase(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DEVICE, execute_all_batches=execute_all_batches
    )
    iterator = Loader([torch.ones(2), torch.ones(2), torch.ones(2)], {1})
    pipeline.progress(iterator)
    with pytest.raises(Trouble, match="cannot read batch 1"):
        pipeline.flush()
    assert len(pipeline.flush() + drain(pipeline, iterator) + pipeline.flush()) == 1
