"""Steps of a training loop: counts that ramp up, failures, arguments that do not fit, other ages of Megatron."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole import megatron
from farandole.bench import _megatron_core
from farandole.megatron import _runs, parallel_state
from megatron_api import megatron_support as support
from support.processes import await_all, run_ranks


def _config(**options: Any) -> megatron.ModelParallelConfig:
    config = megatron.ModelParallelConfig(hidden_size=support.HIDDEN, pipeline_dtype=torch.double, **options)
    config.model_type = None  # type: ignore[attr-defined]
    return config


def _model(rank: int, world_size: int, **options: Any) -> support.Chunk:
    return support.Chunk(_config(**options), rank, world_size)


def _arguments(model: Any, count: int, **changed: Any) -> dict[str, Any]:
    return (
        dict(
            forward_step_func=partial(support.forward_step, "mean", []),
            data_iterator=support.batches(1, count),
            model=model,
            num_microbatches=count,
            seq_length=support.SEQUENCE,
            micro_batch_size=support.BATCH,
        )
        | changed
    )


def _ramps_up(rank: int, world_size: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    group = parallel_state.get_pipeline_model_parallel_group()
    model, alone = _model(rank, world_size), support.Chunk(_config(), rank, world_size)
    others = [support.Chunk(_config(), stage, world_size) for stage in range(world_size)]
    runs = []
    for count in (1, 2, 5, 2, *range(3, 14), 1):
        model.zero_grad()
        for other in others:
            other.zero_grad()
        reduced = megatron.get_forward_backward_func()(**_arguments(model, count))
        losses = []
        for batch in support.batches(1, count):
            x = batch["x"]
            for other in others:
                other.set_input_tensor([None if other.is_first else x])
                x = other(x)
            loss, _ = support.loss_func("mean", batch["weights"], x)
            losses.append(loss.item())
            (loss / count).backward()
        for mine, other in zip(model.parameters(), others[rank].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-12)
        assert [one["loss"].item() for one in reduced] == pytest.approx(losses if rank == world_size - 1 else [])
        runs.append(next(reversed(_runs._runs[group].values())))
    assert runs[3] is runs[1], "a count that comes again finds its compiled step"
    assert len(_runs._runs[group]) == 8
    assert alone.linear.weight.grad is None
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize("backend", ["gloo", "farandole"])
def test_the_number_of_microbatches_may_change_in_every_step(backend):
    run_ranks(_ramps_up, 2, backend)


def _fails(rank: int, world_size: int, where: str, failing: int) -> str:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    recorder = support.Recorder()
    running: list[str] = []

    def timers(name: str, log_level: int | None = None) -> Any:
        def start(barrier: bool = False) -> None:
            assert name not in running, f"{name} runs already"
            running.append(name)

        return SimpleNamespace(start=start, stop=lambda: running.remove(name))

    model = _model(rank, world_size, no_sync_func=recorder.no_sync, timers=timers)
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
            return (loss.repeat(2), reduced) if active[0] and where == "two losses" else (loss, reduced)

        return output, loss_func

    step = megatron.get_forward_backward_func()
    with pytest.raises(RuntimeError) as raised:
        step(**_arguments(model, 4, forward_step_func=forward_step))
    assert running == []
    assert recorder.log == ["no sync", "sync"]
    active[0] = False
    for _ in range(2):
        model.zero_grad()
        step(**_arguments(model, 4, forward_step_func=forward_step))
    others = [support.Chunk(_config(), stage, world_size) for stage in range(world_size)]
    for batch in support.batches(1, 4):
        x = batch["x"]
        for other in others:
            other.set_input_tensor([None if other.is_first else x])
            x = other(x)
        (support.loss_func("mean", batch["weights"], x)[0] / 4).backward()
    for mine, other in zip(model.parameters(), others[rank].parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-9, atol=1e-12)
    parallel_state.destroy_model_parallel()
    return str(raised.value)


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
    ],
)
def test_what_is_raised_reaches_every_rank_and_the_next_step_runs(where, failing, expected):
    for text in run_ranks(_fails, 3, "farandole", where=where, failing=failing):
        assert expected in text


def _refused(rank: int, world_size: int, case: str) -> str:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    step = megatron.forward_backward_pipelining_without_interleaving
    model: Any = _model(rank, world_size)
    changed: dict[str, Any] = {}
    if rank == 1:
        if case == "config":
            model.config.overlap_moe_expert_parallel_comm = True
        elif case == "hidden_size":
            model.config.hidden_size = None
        elif case == "seq_length":
            changed["seq_length"] = 0
        elif case == "two models":
            changed["model"] = [model, model]
        elif case == "no set_input_tensor":
            wrong = nn.Linear(1, 1)
            wrong.config = model.config  # type: ignore[assignment]
            changed["model"] = wrong
        elif case == "count":
            changed["num_microbatches"] = 0
        elif case == "no_sync":
            model.config.no_sync_func = lambda: 1 // 0
    with pytest.raises((RuntimeError, ValueError, TypeError, NotImplementedError, ZeroDivisionError)) as raised:
        step(**(_arguments(model, 4) | changed))
    model = _model(rank, world_size)
    step(**_arguments(model, 4))
    parallel_state.destroy_model_parallel()
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("config", "NotImplementedError: config.overlap_moe_expert_parallel_comm is True, expected False"),
        (
            "hidden_size",
            "ValueError: config.hidden_size is None and config.pipeline_dtype is torch.float64, expected an",
        ),
        ("seq_length", "ValueError: seq_length is 0, expected an int of at least 1"),
        ("two models", "ValueError: model is a list of 2, expected one"),
        ("no set_input_tensor", "RuntimeError: model is a Linear without set_input_tensor, expected one here"),
        ("count", "ValueError: num_microbatches is 0, expected an int of at least 1"),
        ("no_sync", "ZeroDivisionError"),
    ],
)
def test_arguments_that_do_not_fit_are_told_on_every_rank_and_the_next_step_runs(case, expected):
    first, second = run_ranks(_refused, 2, "farandole", case=case)
    assert second.startswith(expected), second
    assert first.startswith("RuntimeError: the step cannot run: rank 1: ")
    assert expected.removeprefix("RuntimeError: ") in first


def _refused_with_barriers(rank: int, world_size: int) -> str:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)

    def timers(name: str, log_level: int | None = None) -> Any:
        return SimpleNamespace(start=lambda barrier=False: dist.barrier() if barrier else None, stop=lambda: None)

    model = _model(rank, world_size, timers=timers)
    step = megatron.get_forward_backward_func()
    with pytest.raises((RuntimeError, ValueError)) as raised:
        step(**_arguments(model, 4 if rank == 0 else 0))
    assert len(step(**_arguments(model, 4))) == (4 if rank == world_size - 1 else 0)
    parallel_state.destroy_model_parallel()
    return str(raised.value)


@pytest.mark.parametrize("backend", ["gloo", "farandole"])
def test_nobody_waits_in_a_timers_barrier_for_a_rank_that_refuses(backend):
    for text in run_ranks(_refused_with_barriers, 2, backend):
        assert "num_microbatches is 0, expected an int of at least 1" in text


def _constant_loss(rank: int, world_size: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    model = _model(rank, world_size)

    def forward_step(iterator: Iterator[Any], model: nn.Module) -> Any:
        output = model(next(iterator)["x"])
        return [output, lambda output: (torch.zeros(()), {"loss": 0})]

    reduced = megatron.get_forward_backward_func()(**_arguments(model, 3, forward_step_func=forward_step))
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
        step(**_arguments(_model(rank, world_size), 4, seq_length=support.SEQUENCE + rank))
    parallel_state.destroy_model_parallel()
    return str(raised.value)


def test_ranks_that_expect_other_shapes_are_told():
    for text in run_ranks(_differs, 2, "gloo"):
        assert "the ranks do not run the same step" in text
        assert "seq_length=4" in text and "seq_length=5" in text


def _wrong_output(rank: int, world_size: int) -> str:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    model = _model(rank, world_size)
    with pytest.raises(RuntimeError) as raised:
        megatron.get_forward_backward_func()(**_arguments(model, 3, micro_batch_size=support.BATCH + 1))
    parallel_state.destroy_model_parallel()
    return str(raised.value)


def test_an_output_that_is_not_what_the_sizes_say_is_an_error():
    for text in run_ranks(_wrong_output, 2, "farandole"):
        assert "rank 0, stage 0, microbatch 0: " in text
        assert "float64[4, 2, 6]" in text and "float64[4, 3, 6]" in text


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
    model, other = _model(rank, world_size), _model(rank, world_size)
    del model.config
    forward_step = partial(support.forward_step, "mean", [])
    timers = timers_of_2 if old_timers else timers_of_3
    reduced = step(forward_step, support.batches(1, 4), model, _Optimizer(), timers, forward_only=False)
    expected = megatron.get_forward_backward_func()(**_arguments(other, 4))
    support.assert_equal(reduced, expected, "reduced")
    for mine, one in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.grad is not None and one.grad is not None
        torch.testing.assert_close(mine.grad, 16 * one.grad, rtol=1e-9, atol=1e-12)
    assert set(calls) == {"forward-compute", "backward-compute"}
    evaluated = step(forward_step, support.batches(1, 4), model, None, None, forward_only=True)
    support.assert_equal(evaluated, expected, "evaluated")
    parallel_state.destroy_model_parallel()


@pytest.mark.parametrize(("size", "old_timers"), [(1, True), (2, True), (2, False)])
def test_the_older_function_takes_optimizer_and_timers(size, old_timers):
    run_ranks(_legacy, size, "farandole", old_timers=old_timers)


def _uses_megatrons_groups(rank: int, world_size: int) -> None:
    _megatron_core.import_schedules()
    from megatron.core import parallel_state as theirs

    theirs.initialize_model_parallel(pipeline_model_parallel_size=2, create_gloo_process_groups=False)
    finalized: list[Any] = []

    def finalize(models: Any, num_tokens: Any, pg_collection: Any = None) -> None:
        finalized.append(pg_collection.pp.size())

    rank_of_pipeline = theirs.get_pipeline_model_parallel_rank()
    model = _model(rank_of_pipeline, 2, finalize_model_grads_func=finalize)
    function = megatron.get_forward_backward_func()
    assert repr(function) == "farandole.megatron.forward_backward_pipelining_without_interleaving"
    reduced = function(**_arguments(model, 3))
    assert len(reduced) == (3 if rank_of_pipeline == 1 else 0)
    assert finalized == [2]
    theirs.destroy_model_parallel()


def test_megatrons_own_groups_are_used_where_it_is_initialized():
    run_ranks(_uses_megatrons_groups, 4, "farandole")


def _exchanges(rank: int, world_size: int, variable: bool) -> None:
    """Every helper once, around a ring, with tensors that say whence and what."""
    group = support.world()
    config = megatron.ModelParallelConfig(pipeline_dtype=torch.float32, variable_seq_lengths=variable)
    p2p = megatron.P2PCommunicator(group, config)
    shape = None if variable else (3, 2)
    previous, following = (rank - 1) % world_size, (rank + 1) % world_size

    def made(by: int, what: int) -> torch.Tensor:
        return torch.full((3, 2), float(10 * by + what))

    def check(tensor: torch.Tensor | None, by: int, what: int) -> None:
        assert tensor is not None and tensor.requires_grad
        assert torch.equal(tensor.detach(), made(by, what)), (rank, by, what, tensor)

    check(p2p.send_forward_recv_forward(made(rank, 1), True, shape), previous, 1)
    check(p2p.send_backward_recv_backward(made(rank, 2), True, shape), following, 2)
    both = p2p.send_forward_backward_recv_forward_backward(made(rank, 3), made(rank, 4), True, True, shape)
    check(both[0], previous, 3)
    check(both[1], following, 4)
    if not variable:
        # Out of order on purpose: the direction tells them apart.
        tensor, works = p2p.send_backward_recv_backward(made(rank, 5), True, shape, overlap_p2p_comm=True)
        other, more = p2p.send_forward_recv_forward(made(rank, 6), True, shape, overlap_p2p_comm=True)
        assert set(works) == {"send_prev", "recv_next"} and set(more) == {"send_next", "recv_prev"}
        for work in (*more.values(), *works.values()):
            work.wait()
        check(tensor, following, 5)
        check(other, previous, 6)
    first, last = p2p.is_pp_first_stage, p2p.is_pp_last_stage
    assert (first, last, p2p.current_stage, p2p.total_stages) == (rank == 0, rank == world_size - 1, rank, world_size)
    # Down the chain and up again, as 1F1B does with one microbatch; two tensors on the way down.
    received = p2p.recv_forward([(3, 2), (3, 2)] if shape is None else [shape, shape], first)
    for i, tensor in enumerate(received):
        assert tensor is None if first else check(tensor, previous, 7 + i) is None
    p2p.send_forward([made(rank, 7), made(rank, 8)], last)
    grad = p2p.recv_backward((3, 2), last)
    assert grad is None if last else check(grad, following, 9) is None
    p2p.send_backward(made(rank, 9), first)
    # The fused ones: a pair of ranks at a time.
    if rank < world_size - 1 and rank % 2 == 0:
        check(p2p.send_forward_recv_backward(made(rank, 1), (3, 2), last), following, 2)
    elif rank % 2 == 1:
        check(p2p.send_backward_recv_forward(made(rank, 2), (3, 2), first), previous, 1)
    assert p2p.send_forward_recv_backward(made(0, 0), (3, 2), True) is None
    assert p2p.send_backward_recv_forward([made(0, 0)], [(3, 2)], True) == [None]
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", ["gloo", "farandole"])
@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("variable", [False, True])
def test_exchanges_bring_what_the_neighbours_sent(backend, size, variable):
    run_ranks(_exchanges, size, backend, variable=variable)


def test_without_groups_there_is_no_pipeline():
    with pytest.raises(RuntimeError, match="model parallelism is not initialized"):
        megatron.get_forward_backward_func()
    assert megatron.get_forward_backward_func(pp_size=1) is megatron.forward_backward_no_pipelining
    assert megatron.get_forward_backward_func(2, 2) is megatron.forward_backward_pipelining_with_interleaving
    model = _model(0, 1)
    assert len(megatron.forward_backward_no_pipelining(**_arguments(model, 3))) == 3
    assert not dist.is_initialized()
    with pytest.raises(RuntimeError, match="expected initialize_model_parallel"):
        megatron.forward_backward_pipelining_without_interleaving(**_arguments(model, 3))


def _bad_groups(rank: int, world_size: int) -> None:
    for arguments, message in (
        (dict(pipeline_model_parallel_size=3), r"pipeline_model_parallel_size is 3, expected a divisor of the 2 ranks"),
        (dict(tensor_model_parallel_size=0), "tensor_model_parallel_size is 0, expected an int of at least 1"),
        (
            dict(pipeline_model_parallel_size=2, pipeline_model_parallel_split_rank=2),
            "pipeline_model_parallel_split_rank is 2, expected 1 to 1",
        ),
        (
            dict(virtual_pipeline_model_parallel_size=2),
            "virtual_pipeline_model_parallel_size is 2 with 1 pipeline ranks",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            parallel_state.initialize_model_parallel(**arguments)
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    assert parallel_state.get_tensor_model_parallel_rank() == rank
    with pytest.raises(RuntimeError, match="initialized already"):
        parallel_state.initialize_model_parallel()


def test_sizes_that_do_not_fit_the_world_are_refused():
    run_ranks(_bad_groups, 2, "farandole")
