"""Steps of a training loop: counts that change, failures, sizes that differ."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from farandole import megatron
from farandole.megatron import _runs, parallel_state
from megatron_api import megatron_support as support
from support.processes import run_ranks


def _ramps_up(rank: int, world_size: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    group = parallel_state.get_pipeline_model_parallel_group()
    model = support.chunk_of(rank, world_size)
    runs = []
    for count in (1, 2, 5, 2, *range(3, 14), 1):
        model.zero_grad()
        reduced = megatron.get_forward_backward_func()(**support.arguments(model, count))
        alone, losses = support.train_alone(world_size, count, [1])
        support.assert_gradients(model, alone[rank])
        assert [one["loss"].item() for one in reduced] == pytest.approx(losses if rank == world_size - 1 else [])
        runs.append(next(reversed(_runs._runs[group].values())))
    assert runs[3] is runs[1], "a count that comes again finds its compiled step"
    assert len(_runs._runs[group]) == 8
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("backend", ["gloo", "farandole"])
def test_the_number_of_microbatches_may_change_in_every_step(backend):
    run_ranks(_ramps_up, 2, backend)


def _releases_buffers(rank: int, world_size: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    model = support.chunk_of(rank, world_size)
    received: list[Any] = []

    def forward_step(iterator: Iterator[Any], model: Any) -> Any:
        if rank > 0:
            received.append(weakref.ref(model.input_tensor.untyped_storage()))
        return support.forward_step("mean", [], iterator, model)

    step = megatron.get_forward_backward_func()
    for count in (4, 3):
        before = list(received)
        step(**support.arguments(model, count, forward_step_func=forward_step))
        model.input_tensor = None
        assert support.count_held(before, most=0) == 0, count
        assert rank == 0 or any(storage() is not None for storage in received), "the next such step finds its buffers"
    parallel_state.destroy_model_parallel()


def test_a_step_of_another_kind_lets_the_receive_buffers_of_the_one_before_go():
    run_ranks(_releases_buffers, 2, "farandole")


def _fails(rank: int, world_size: int, where: str, failing: int) -> str:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    recorder = support.Recorder()
    running: list[str] = []

    def timers(name: str, log_level: int | None = None) -> Any:
        def start(barrier: bool = False) -> None:
            assert name not in running, f"{name} runs already"
            running.append(name)

        return SimpleNamespace(start=start, stop=lambda: running.remove(name))

    checks = {"check_for_nan_in_loss_and_grad": True} if where == "nan" else {}
    model = support.chunk_of(rank, world_size, no_sync_func=recorder.no_sync, timers=timers, **checks)
    active = [True]

    def forward_step(iterator: Iterator[Any], model: nn.Module) -> Any:
        if active[0] and rank == failing and where == "forward":
            raise ZeroDivisionError("no such luck")
        batch = next(iterator)
        output = model(batch["x"])
        if active[0] and rank == failing and where == "backward":
            output.register_hook(lambda grad: 1 // 0)

        def loss_func(output: torch.Tensor) -> Any:
            if active[0] and where == "loss":
                raise ZeroDivisionError("no such luck")
            loss, reduced = support.loss_func("mean", batch["weights"], output)
            if active[0] and where == "nan":
                return loss * float("nan"), reduced
            return (loss.repeat(2), reduced) if active[0] and where == "two losses" else (loss, reduced)

        return output, loss_func

    step = megatron.get_forward_backward_func()
    with pytest.raises(RuntimeError) as raised:
        step(**support.arguments(model, 4, forward_step_func=forward_step))
    assert running == []
    assert recorder.log == ["no sync", "sync"]
    active[0] = False
    for _ in range(2):
        model.zero_grad()
        step(**support.arguments(model, 4, forward_step_func=forward_step))
    alone, _ = support.train_alone(world_size, 4, [1])
    support.assert_gradients(model, alone[rank])
    parallel_state.destroy_model_parallel()
    return str(raised.value)


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("where", "failing", "expected"),
    [
        ("forward", 0, "rank 0, stage 0, microbatch 0: forward: ZeroDivisionError: no such luck"),
        ("forward", 1, "rank 1, stage 1, microbatch 0: forward: ZeroDivisionError: no such luck"),
        ("loss", 2, "rank 2, stage 2, microbatch 0: forward: ZeroDivisionError: no such luck"),
        (
            "backward",
            1,
            "rank 1, stage 1, microbatch 0: backward: ZeroDivisionError: integer division or modulo by zero",
        ),
        ("two losses", 2, "expected a tensor of one element"),
        ("nan", 2, "rank 2, stage 2, microbatch 0: the loss is NaN or infinite, expected a finite number"),
    ],
)
def test_what_is_raised_reaches_every_rank_and_the_next_step_runs(where, failing, expected):
    for text in run_ranks(_fails, 3, "farandole", where=where, failing=failing):
        assert expected in text


def _constant_loss(rank: int, world_size: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    model = support.chunk_of(rank, world_size)

    def forward_step(iterator: Iterator[Any], model: nn.Module) -> Any:
        output = model(next(iterator)["x"])
        return [output, lambda output: (torch.zeros(()), {"loss": 0})]

    reduced = megatron.get_forward_backward_func()(**support.arguments(model, 3, forward_step_func=forward_step))
    assert reduced == ([{"loss": 0}] * 3 if rank == world_size - 1 else [])
    for parameter in model.parameters():
        assert parameter.grad is None or not parameter.grad.any()
    parallel_state.destroy_model_parallel()


def test_a_loss_of_nothing_gives_no_gradients():
    run_ranks(_constant_loss, 2, "farandole")


def _differs(rank: int, world_size: int) -> str:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    step = megatron.get_forward_backward_func()
    with pytest.raises(RuntimeError) as raised:
        step(**support.arguments(support.chunk_of(rank, world_size), 4, seq_length=support.SEQUENCE + rank))
    parallel_state.destroy_model_parallel()
    return str(raised.value)


def test_ranks_that_expect_other_shapes_are_told():
    for text in run_ranks(_differs, 2, "gloo"):
        assert "the ranks do not run the same step" in text
        assert "seq_length=4" in text and "seq_length=5" in text


def _wrong_output(rank: int, world_size: int) -> str:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    model = support.chunk_of(rank, world_size)
    with pytest.raises(RuntimeError) as raised:
        megatron.get_forward_backward_func()(**support.arguments(model, 3, micro_batch_size=support.BATCH + 1))
    parallel_state.destroy_model_parallel()
    return str(raised.value)


def test_an_output_that_is_not_what_the_sizes_say_is_an_error():
    for text in run_ranks(_wrong_output, 2, "farandole"):
        assert "rank 0, stage 0, microbatch 0: " in text
        assert "float64[4, 2, 6]" in text and "float64[4, 3, 6]" in text
