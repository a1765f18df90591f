"""Arguments and groups that do not fit: told on every rank, and nobody waits."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole import megatron
from farandole.megatron import parallel_state
from megatron_api import megatron_support as support
from support.devices import DEVICE
from support.processes import run_ranks

_REFUSALS = (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError, ZeroDivisionError)


def _refused(rank: int, world_size: int, case: str) -> str:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    step = megatron.forward_backward_pipelining_without_interleaving
    model: Any = support.chunk_of(rank, world_size)
    changed: dict[str, Any] = {}
    left_out: set[str] = set()
    if case == "starts no timer":
        plain = SimpleNamespace(start=lambda barrier=False: None, stop=lambda: None)
        model.config.timers = lambda name, log_level=None: SimpleNamespace() if rank == 1 else plain
    if rank == 1:
        if case == "unknown":
            changed["sequence_length"] = 4
        elif case == "missing":
            left_out = {"micro_batch_size"}
        elif case == "timers":
            model.config.timers = "timers"
        elif case == "config":
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
    given = support.arguments(model, 4) | changed
    with pytest.raises(_REFUSALS) as raised:
        step(**{name: value for name, value in given.items() if name not in left_out})
    model = support.chunk_of(rank, world_size)
    step(**support.arguments(model, 4))
    parallel_state.destroy_model_parallel()
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.sample(4)
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
        (
            "unknown",
            "TypeError: forward_backward_pipelining_without_interleaving() got an unexpected keyword argument "
            "'sequence_length'",
        ),
        (
            "missing",
            "TypeError: forward_backward_pipelining_without_interleaving() missing 1 required keyword-only argument: "
            "'micro_batch_size'",
        ),
        ("timers", "TypeError: config.timers is a str, expected a callable"),
        ("starts no timer", "AttributeError: 'types.SimpleNamespace' object has no attribute 'start'"),
    ],
)
def test_arguments_that_do_not_fit_are_told_on_every_rank_and_the_next_step_runs(case, expected):
    first, second = run_ranks(_refused, 2, "farandole", case=case)
    assert second.startswith(expected), second
    assert first.startswith("RuntimeError: the step cannot run: rank 1: ")
    assert expected.removeprefix("RuntimeError: ") in first


def _refused_groups(rank: int, world_size: int, group: Any) -> str:
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=world_size, virtual_pipeline_model_parallel_size=2
    )
    models = [support.chunk_of(chunk * world_size + rank, 2 * world_size) for chunk in range(2)]
    config: Any = models[0].config

    def step() -> None:
        given = support.arguments(models, 4, data_iterator=[support.batches(1, 4) for _ in models])
        megatron.get_forward_backward_func()(**given)

    config.microbatch_group_size_per_vp_stage = group if rank == 1 else world_size
    with pytest.raises(_REFUSALS) as raised:
        step()
    config.microbatch_group_size_per_vp_stage = world_size
    step()
    parallel_state.destroy_model_parallel()
    return str(raised.value)


@pytest.mark.parametrize("group", [1, 2.0])
def test_a_microbatch_group_is_named_as_the_config_has_it(group):
    for text in run_ranks(_refused_groups, 2, "farandole", group=group):
        assert f"config.microbatch_group_size_per_vp_stage is {group}, expected None or an int of at least 2" in text


def _refused_by_the_older_function(rank: int, world_size: int, case: str) -> str:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    is_wrong = rank == 1
    step = megatron.LegacyForwardBackward(
        get_num_microbatches=lambda: 1 // 0 if is_wrong and case == "count" else 4,  # type: ignore[arg-type]
        seq_length=support.SEQUENCE,
        micro_batch_size=support.BATCH,
        hidden_size=support.HIDDEN,
        params_dtype=torch.double,
    )
    model = support.chunk_of(rank, world_size)
    del model.config
    forward_step = partial(support.forward_step, "mean", [])

    def call(**kwargs: Any) -> Any:
        optimizer = object() if is_wrong and case == "optimizer" and not kwargs.get("forward_only") else None
        return step(forward_step, support.batches(1, 4), model, optimizer, None, **kwargs)

    with pytest.raises(_REFUSALS) as raised:
        call(**{"collect": True} if is_wrong and case == "unknown" else {})
    is_wrong = False
    call()
    parallel_state.destroy_model_parallel()
    return f"{type(raised.value).__name__}: {raised.value}"


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("count", "ZeroDivisionError: "),
        ("optimizer", "AttributeError: 'object' object has no attribute 'scale_loss'"),
        ("unknown", "TypeError: LegacyForwardBackward() got an unexpected keyword argument 'collect'"),
    ],
)
def test_what_the_older_function_refuses_is_told_on_every_rank(case: str, expected: str) -> None:
    first, second = run_ranks(_refused_by_the_older_function, 2, "farandole", case=case)
    assert second.startswith(expected), second
    assert first.startswith("RuntimeError: the step cannot run: rank 1: ") and expected in first, first


def _refused_with_barriers(rank: int, world_size: int) -> str:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)

    def timers(name: str, log_level: int | None = None) -> Any:
        return SimpleNamespace(start=lambda barrier=False: dist.barrier() if barrier else None, stop=lambda: None)

    model = support.chunk_of(rank, world_size, timers=timers)
    step = megatron.get_forward_backward_func()
    with pytest.raises((RuntimeError, ValueError)) as raised:
        step(**support.arguments(model, 4 if rank == 0 else 0))
    assert len(step(**support.arguments(model, 4))) == (4 if rank == world_size - 1 else 0)
    parallel_state.destroy_model_parallel()
    return str(raised.value)


@pytest.mark.parametrize("backend", ["gloo", "farandole"])
def test_nobody_waits_in_a_timers_barrier_for_a_rank_that_refuses(backend):
    for text in run_ranks(_refused_with_barriers, 2, backend):
        assert "num_microbatches is 0, expected an int of at least 1" in text


def test_without_groups_there_is_no_pipeline():
    with pytest.raises(RuntimeError, match="model parallelism is not initialized"):
        megatron.get_forward_backward_func()
    assert megatron.get_forward_backward_func(pp_size=1) is megatron.forward_backward_no_pipelining
    assert megatron.get_forward_backward_func(2, 2) is megatron.forward_backward_pipelining_with_interleaving
    with torch.device(DEVICE):
        model = support.chunk_of(0, 1)
        assert len(megatron.forward_backward_no_pipelining(**support.arguments(model, 3))) == 3
        assert not dist.is_initialized()
        with pytest.raises(RuntimeError, match="expected initialize_model_parallel"):
            megatron.forward_backward_pipelining_without_interleaving(**support.arguments(model, 3))


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
