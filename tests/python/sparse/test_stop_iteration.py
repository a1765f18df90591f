"""A StopIteration that does not come from the iterator is an error of its batch, and no end of the data."""

from __future__ import annotations

import pytest
import torch

from farandole.sparse import EvalPipelineSparseDist, TrainPipelineBase, TrainPipelineSparseDist
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import Batch, assert_same, drain, drain_with_errors, made, make_batches, plain_loop

FAILS = 2  # the batch


def _next_of_nothing() -> None:
    next(iter(()))


class Ending(Batch):
    def to(self, device: torch.device, non_blocking: bool = False) -> Ending:
        _next_of_nothing()
        raise AssertionError


def end(rank: int, world_size: int, where: str, threads: bool) -> None:
    (model, optimizer), (plain, plain_optimizer) = made(), made()
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, load_on_thread=threads, dist_on_thread=threads)
    batches = make_batches(1, 6)
    fed = list(batches)
    table = model.module.tables[0]
    calls = {"count": -1}

    def at(number: int) -> None:
        calls["count"] += 1
        if calls["count"] == number:
            _next_of_nothing()

    if where == "to":
        fed[FAILS] = Ending(**vars(batches[FAILS]))
    elif where == "input_dist":
        table.before_dist = lambda: at(FAILS)
    elif where == "forward":
        pipeline._model_fwd = lambda batch: (at(FAILS), model(batch))[1]
    else:
        handle = optimizer.register_step_pre_hook(lambda *_: at(FAILS))
    seen = drain_with_errors(pipeline, iter(fed))
    assert len(seen) == 6
    assert isinstance(seen[FAILS], RuntimeError)
    assert "StopIteration, which only the iterator's __next__ may" in str(seen[FAILS])
    assert isinstance(seen[FAILS].__cause__, StopIteration)
    if where == "step":
        handle.remove()
        return
    trained = [*batches[:FAILS], *batches[FAILS + 1 :]]
    expected = plain_loop(plain, plain_optimizer, trained)
    assert all(map(torch.equal, [*seen[:FAILS], *seen[FAILS + 1 :]], expected))
    assert_same(model, plain)


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("where", ["to", "input_dist", "forward", "step"])
def test_a_stop_iteration_of_others_is_an_error(where, threads):
    run_ranks(end, 2, "farandole", where=where, threads=threads)


def evaluate(rank: int, world_size: int) -> None:
    """Losses are for training: without it they may be anything."""
    model, optimizer = made()
    batches = make_batches(1, 4)
    model.eval()
    for kind in (TrainPipelineBase, TrainPipelineSparseDist, EvalPipelineSparseDist):
        expected = drain(kind(model, optimizer, DEVICE), iter(batches))
        for losses in (None, 0.5, {"a": 1}):
            pipeline = kind(model, optimizer, DEVICE, custom_model_fwd=lambda batch: (losses, model(batch)[1]))  # noqa: B023
            assert all(map(torch.equal, drain(pipeline, iter(batches)), expected))
    model.train()
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, custom_model_fwd=lambda batch: (0.5, model(batch)[1]))
    with pytest.raises(TypeError, match=r"the model returned \(losses, output\), losses a float: expected a tensor"):
        pipeline.progress(iter(batches))
    for wrong in (1, None, "x"):
        for amp in (False, True):
            with pytest.raises(TypeError, match=f"enable_grad_scaling={wrong!r}: expected a bool"):
                TrainPipelineSparseDist(model, optimizer, DEVICE, enable_amp=amp, enable_grad_scaling=wrong)
    with pytest.raises(ValueError, match="grad_accum=3: expected None, an evaluation has no windows"):
        EvalPipelineSparseDist(model, optimizer, DEVICE, grad_accum=3)


def test_an_evaluation_needs_no_losses_and_has_no_windows():
    run_ranks(evaluate, 2, "farandole")
