"""A model that changes after it was wrapped: the result is right, or all ranks are told which parameter it was."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from farandole import megatron
from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from farandole.megatron import parallel_state
from support.devices import ON_CPU, backend_for, seeded
from support.processes import run_ranks


class Layers(torch.nn.Module):
    def __init__(self, hidden: int = 4) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.front, self.back = torch.nn.Linear(4, hidden), torch.nn.Linear(hidden, 4)
        self.frozen = torch.nn.Linear(4, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.front.weight.dtype)
        x = self.back(torch.tanh(self.front(x)))
        return self.frozen(x.to(self.frozen.weight.dtype)).square().sum()


def _input(rank: int) -> torch.Tensor:
    return torch.randn(2, 4, generator=seeded(rank))


def _move(model: Layers) -> None:
    model.front.weight.data = model.front.weight.data.clone()


def _double(model: Layers) -> None:
    model.double()


def _there_and_back(model: Layers) -> None:
    model.double().float()


def _assign(model: Layers) -> None:
    model.load_state_dict(Layers().state_dict(), assign=True)


def _unfreeze(model: Layers) -> None:
    model.frozen.requires_grad_(True)


def _add(model: Layers) -> None:
    model.front.scale = torch.nn.Parameter(torch.ones(()))


def _tie(model: Layers) -> None:
    model.back.weight = model.front.weight


# By how a model changes: what is said of it, with its name.
_MOVED = "parameter 'front.weight' has got other memory since the module was wrapped"
_RETYPED = "parameter 'front.weight' has changed its type or device since the module was wrapped"
_NEW = "parameter '{}' requires a gradient, and is not one of those that were wrapped"
REFUSED: list[tuple[Callable[[Layers], None], str]] = [
    (_double, _RETYPED),
    (_there_and_back, _RETYPED),
    (_assign, _NEW.format("front.weight")),
    (_unfreeze, _NEW.format("frozen.weight")),
    (_add, _NEW.format("front.scale")),
]


def _error_of(body: Callable[[], Any]) -> str:
    try:
        body()
    except RuntimeError as error:
        return str(error)
    return ""


def _changes(rank: int, world_size: int, everywhere: bool) -> list[tuple[str, str]]:
    """(what was expected, what was raised), of changes on all ranks, or on rank 1 alone."""
    results = []
    for sharded in (False, True):
        for unused in ("error", "skip"):
            for change, expected in [*REFUSED, *([(_move, _MOVED)] if sharded else [])]:
                model = DistributedDataParallel(
                    Layers(), bucket_size=10, unused_parameters=unused, use_distributed_optimizer=sharded
                )
                optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
                model(_input(rank)).backward()
                optimizer.step()
                optimizer.zero_grad()
                if everywhere or rank == 1:
                    change(model.module)
                error = _error_of(lambda: model(_input(rank)).backward())  # noqa: B023
                results.append((expected, f"{change.__name__} {sharded} {unused}: {error}"))
    return results


@pytest.mark.parametrize("everywhere", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_that_changes_is_refused_by_name_on_all_ranks(backend, everywhere):
    for results in run_ranks(_changes, 2, backend, timeout=60, everywhere=everywhere):
        for expected, error in results:
            assert re.search(r"rank 1 of the group: [^\n]*" + re.escape(expected), error), error


def _right(rank: int, world_size: int) -> None:
    """Other memory is as good where the wrapper has none of it; a weight that is tied later has the gradients of both;
    memory that is back where it was is as if nothing had been."""
    for change in (_move, _tie):
        model = DistributedDataParallel(Layers(), bucket_size=10, unused_parameters="skip")
        plain = Layers()
        model(_input(rank)).backward()
        model.zero_grad()
        for one in (model.module, plain):
            change(one)
        model(_input(rank)).backward()
        sum(plain(_input(other)) for other in range(world_size)).div(world_size).backward()
        for ours, theirs in zip(model.module.parameters(), plain.parameters(), strict=True):
            if theirs.requires_grad:
                assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8 if ON_CPU else 1e-6)
    model = DistributedDataParallel(Layers(), use_distributed_optimizer=True)
    weight = model.module.front.weight
    ours = weight.data
    weight.data = ours.clone()
    with torch.no_grad():
        model(_input(rank))  # e.g. to evaluate an average
    assert "has got other memory" in _error_of(lambda: model(_input(rank)).backward())
    model.zero_grad_buffer()
    weight.data = ours
    model(_input(rank)).backward()


def test_what_changes_and_can_be_right_is_right():
    run_ranks(_right, 2, BACKENDS[-1], timeout=60)


# Large gradients stay where autograd computed them, small ones are in buckets.
HELD: list[dict[str, Any]] = [
    {"hidden": 4},
    {"hidden": 1100},
    {"hidden": 1100, "gradient_as_bucket_view": True},
    {"hidden": 1100, "overlap_grad_reduce": False},
    {"hidden": 4, "find_unused_parameters": True},
]


def _convert(model: Layers, dtype: torch.dtype) -> None:
    """With ``.grad``, as `double()` and `bfloat16()` do, which are main_grad."""
    model.to(dtype)


def _turn(model: Layers, dtype: torch.dtype) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.grad.dim() == 2:
            parameter.grad.data = parameter.grad.detach().t().contiguous().t()


def _shorten(model: Layers, dtype: torch.dtype) -> None:
    grad = model.back.weight.grad
    assert grad is not None
    grad.data = grad.detach()[:2].clone()


def _with_gradients(rank: int, world_size: int) -> list[str]:
    errors = []
    for options in HELD:
        hidden = options["hidden"]
        given = {name: value for name, value in options.items() if name != "hidden"}
        for zeroes in (False, True):
            for dtype in (torch.float64, torch.bfloat16):
                model = DistributedDataParallel(Layers(hidden), bucket_size=10, **given)
                model(_input(rank)).backward()
                _convert(model.module, dtype)
                if zeroes:
                    model.zero_grad()
                for _ in range(2):
                    errors.append(_error_of(lambda: model(_input(rank)).backward()))  # noqa: B023
            model, plain = DistributedDataParallel(Layers(hidden), bucket_size=10, **given), Layers(hidden)
            for _ in range(2):
                model(_input(rank)).backward()
                sum(plain(_input(other)) for other in range(world_size)).div(world_size).backward()
                for one in (model.module, plain):
                    _turn(one, torch.float32)
                    if zeroes:
                        one.zero_grad()
            model(_input(rank)).backward()
            sum(plain(_input(other)) for other in range(world_size)).div(world_size).backward()
            for ours, theirs in zip(model.module.parameters(), plain.parameters(), strict=True):
                if theirs.requires_grad:
                    assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
                    assert torch.equal(ours.main_grad, ours.grad)
    return errors


def test_gradients_that_are_converted_with_their_model_are_not_written_to_as_what_they_were():
    for errors in run_ranks(_with_gradients, 2, BACKENDS[-1], timeout=120):
        assert len(errors) == len(HELD) * 2 * 2 * 2
        for error in errors:
            assert re.search(r"rank 1 of the group: [^\n]*" + re.escape(_RETYPED), error), error


def _converted_under_an_optimizer(rank: int, world_size: int) -> list[str]:
    errors = []
    for options in ({}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}):
        for everywhere in (True, False):
            model = DistributedDataParallel(Layers(), bucket_size=10, **options)
            optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
            model(_input(rank)).backward()
            optimizer.step()
            if everywhere or rank == 1:
                _convert(model.module, torch.bfloat16)
            optimizer.zero_grad()
            errors.append(_error_of(lambda: model(_input(rank)).backward()))  # noqa: B023
    return errors


def test_a_model_that_is_converted_under_an_optimizer_is_refused_by_name_on_all_ranks():
    for errors in run_ranks(_converted_under_an_optimizer, 2, BACKENDS[-1], timeout=60):
        for error in errors:
            assert re.search(r"rank 1 of the group: [^\n]*" + re.escape(_RETYPED), error), error


def _other_shape(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(Layers(), bucket_size=10)
    model(_input(rank)).backward()
    _shorten(model.module, torch.float32)
    with pytest.raises(RuntimeError, match=r"the gradient of parameter 'back.weight' has the shape \[2, 4\]"):
        model.start_grad_sync()


def test_a_gradient_of_another_shape_is_refused_by_name():
    run_ranks(_other_shape, 2, BACKENDS[-1], timeout=60)


def _whole_copies(rank: int, world_size: int) -> None:
    """Nothing is sharded, but the optimizer has the memory that the parameters had."""
    for dtype in (torch.float32, torch.bfloat16):
        model = DistributedDataParallel(Layers().to(dtype), grad_reduce_in_fp32=True)
        model.module.front.weight.data = model.module.front.weight.data.clone()  # before it is made is well
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        before = model.module.front.weight.detach().clone()
        optimizer.zero_grad()
        model(_input(rank)).backward()
        optimizer.step()
        assert not torch.equal(before, model.module.front.weight)
        optimizer.zero_grad()
        if rank == 0:
            _move(model.module)
        error = _error_of(lambda: model(_input(rank)).backward())  # noqa: B023
        assert "rank 0 of the group: " + _MOVED in error, error


def test_an_optimizer_with_float32_copies_knows_of_other_memory():
    run_ranks(_whole_copies, 2, BACKENDS[-1], timeout=60)


def _megatron(rank: int, world_size: int) -> None:
    parallel_state.initialize_model_parallel()
    for change, expected in [*REFUSED, (_move, _MOVED)]:
        config = megatron.ModelParallelConfig()
        ddp_config = megatron.DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True)
        model = megatron.DistributedDataParallel(config, ddp_config, Layers())
        for step in range(2):
            model.zero_grad_buffer()
            with model.no_sync():
                model(_input(rank)).backward()
            model(_input(rank)).backward()
            if step == 0:
                model.finish_grad_sync()
                if rank == 1:
                    change(model.module)
            else:
                error = _error_of(model.finish_grad_sync)
                assert "rank 1 of the group: " in error and expected in error, (change.__name__, error)


def test_megatrons_wrapper_says_so_when_gradients_are_finished():
    run_ranks(_megatron, 2, BACKENDS[-1], timeout=60)


def _call_functionally(rank: int, world_size: int) -> None:
    torchs = TorchDdp(Layers(), process_group=dist.new_group(backend=backend_for("gloo")))
    ours = DistributedDataParallel(Layers())
    for step in range(2):
        grads = []
        for model in (torchs, ours):
            model.zero_grad()
            twice = {name: 2 * parameter for name, parameter in model.named_parameters()}
            torch.func.functional_call(model, twice, _input(rank + step)).backward()
            own = {name: parameter.detach().requires_grad_() for name, parameter in twice.items()}
            torch.func.functional_call(model, own, _input(rank)).backward()  # which nobody averages
            named = [(name, parameter.grad) for name, parameter in model.named_parameters()]
            grads.append([*named, *((name, parameter.grad) for name, parameter in own.items())])
            model(_input(rank)).backward()
        for (name, want), (_, got) in zip(*grads, strict=True):
            assert want is got is None or torch.equal(want, got), f"step {step} rank {rank} {name}"


def test_functional_call_is_no_change_and_gradients_are_those_of_torch():
    run_ranks(_call_functionally, 2, "gloo")
