"""Megatron of other ages: the function that takes optimizer and timers, and its own parallel_state."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farandole import megatron
from farandole.megatron import parallel_state
from megatron_api import megatron_support as support
from support.megatrons import import_schedules, needs_megatron
from support.processes import run_ranks


class _Optimizer:
    def scale_loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * 16


def _legacy(rank: int, world_size: int, old_timers: bool) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    calls: list[str] = []
    plain = SimpleNamespace(start=lambda: None, stop=lambda: None)

    def timers_of_2(name: str) -> Any:
        calls.append(name)
        return plain

    def timers_of_3(name: str, log_level: int | None = None) -> Any:
        calls.append(name)
        return SimpleNamespace(start=lambda barrier=False: None, stop=lambda: None)

    step = megatron.LegacyForwardBackward(
        get_num_microbatches=lambda: 4,
        seq_length=support.SEQUENCE,
        micro_batch_size=support.BATCH,
        hidden_size=support.HIDDEN,
        params_dtype=torch.double,
    )
    model, other = support.chunk_of(rank, world_size), support.chunk_of(rank, world_size)
    del model.config
    forward_step = partial(support.forward_step, "mean", [])
    timers = timers_of_2 if old_timers else timers_of_3
    reduced = step(forward_step, support.batches(1, 4), model, _Optimizer(), timers, forward_only=False)
    expected = megatron.get_forward_backward_func()(**support.arguments(other, 4))
    support.assert_equal(reduced, expected, "reduced")
    support.assert_gradients(model, other, factor=16)
    assert set(calls) == {"forward-compute", "backward-compute"}
    evaluated = step(forward_step, support.batches(1, 4), model, None, None, forward_only=True)
    support.assert_equal(evaluated, expected, "evaluated")
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(("size", "old_timers"), [(1, True), (2, True), (2, False)])
def test_the_older_function_takes_optimizer_and_timers(size, old_timers):
    run_ranks(_legacy, size, "farandole", old_timers=old_timers)


def _uses_megatrons_groups(rank: int, world_size: int) -> None:
    import_schedules()
    from megatron.core import parallel_state as theirs

    theirs.initialize_model_parallel(pipeline_model_parallel_size=2, create_gloo_process_groups=False)
    finalized: list[Any] = []

    def finalize(models: Any, num_tokens: Any, pg_collection: Any = None) -> None:
        finalized.append(pg_collection.pp.size())

    rank_of_pipeline = theirs.get_pipeline_model_parallel_rank()
    model = support.chunk_of(rank_of_pipeline, 2, finalize_model_grads_func=finalize)
    function = megatron.get_forward_backward_func()
    assert repr(function) == "farandole.megatron.forward_backward_pipelining_without_interleaving"
    reduced = function(**support.arguments(model, 3))
    assert len(reduced) == (3 if rank_of_pipeline == 1 else 0)
    assert finalized == [2]
    theirs.destroy_model_parallel()


@needs_megatron
def test_megatrons_own_groups_are_used_where_it_is_initialized():
    run_ranks(_uses_megatrons_groups, 4, "farandole")
