"""Stages that put the gradients of weights off by themselves, and hand them over by a dw_builder."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.pipelining import PipelineStage, Schedule1F1B, get_schedule_class, plan
from pipelining.pipeline_support import BACKENDS, assert_same_gradients, train_alone
from support.devices import DEVICE
from support.processes import run_ranks

WIDTH = 5


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, put_off: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.put_off = put_off
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        x, weight = ctx.saved_tensors
        ctx.put_off.append((x, grad))
        return grad @ weight.t(), None, None


class Deferred(nn.Module):
    """x @ weight + bias; the gradient of the weight only when what the builder has returned is called."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH))
        self.put_off: list[Any] = []
        self.built = self.run = 0
        self.fail_in_build = self.fail_in_run = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(_Multiply.apply(x, self.weight, self.put_off) + self.bias)

    def dw_builder(self) -> Callable[[], None]:
        number, self.built = self.built, self.built + 1
        mine = self.put_off.copy()
        self.put_off.clear()
        if number == self.fail_in_build:
            raise ValueError("no runner")
        assert len(mine) == 1, "a backward was built twice or not at all"

        def run() -> None:
            self.run += 1
            if number == self.fail_in_run:
                raise ValueError("no weights")
            (x, grad) = mine.pop()
            added = x.t() @ grad
            self.weight.grad = added if self.weight.grad is None else self.weight.grad + added

        return run


class Plain(Deferred):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight + self.bias)


def _train(rank: int, world_size: int) -> None:
    n = 5
    for name in ("1F1B", "ZB-H1", "ZBV", "InterleavedZeroBubble", "DualPipeV"):
        torch.manual_seed(2)
        num_stages = world_size if name in ("1F1B", "ZB-H1") else 2 * world_size
        modules = [Deferred() for _ in range(num_stages)]
        plain: list[nn.Module] = [Plain() for _ in range(num_stages)]
        for module, other in zip(modules, plain, strict=True):
            other.load_state_dict(module.state_dict())
        made = plan(name, num_stages, n, num_ranks=world_size)
        stages = [
            PipelineStage(modules[i], i, num_stages, DEVICE, dw_builder=modules[i].dw_builder)
            for i, owner in enumerate(made.rank_of_stage)
            if owner == rank
        ]
        schedule = get_schedule_class(name)(stages[0] if num_stages == world_size else stages, n, nn.MSELoss())
        for rows in (10, 10, 13):
            batch, target = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
            for module in modules:
                module.zero_grad()
                module.built = module.run = 0
            schedule.step(batch, target=target)
            alone, _, _ = train_alone(plain, nn.MSELoss(), batch, target, n)
            for stage in stages:
                where = f"{name}, {rows} rows, stage {stage.stage_index}"
                assert_same_gradients(stage.submod, alone[stage.stage_index], where, tolerance=2e-5)
                assert (stage.submod.built, stage.submod.run) == (n, n), where
                assert not stage.submod.put_off, where
        schedule.eval(batch, target=target)
        assert all(stage.submod.built == n for stage in stages)


@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_that_are_put_off_get_the_gradients_of_one_process(backend: str) -> None:
    run_ranks(_train, 2, backend)


class _Logged(Deferred):
    def __init__(self, log: list[str]):
        super().__init__()
        self.log = log

    def dw_builder(self) -> Callable[[], None]:
        run, number = super().dw_builder(), self.built - 1
        self.log.append(f"build {number}")

        def logged() -> None:
            self.log.append(f"run {number}")
            run()

        return logged


def _log_order(rank: int, world_size: int) -> None:
    log: list[str] = []
    for name in ("ZB-H1", "1F1B"):
        log.clear()
        module = _Logged(log)
        stage = PipelineStage(module, rank, world_size, DEVICE, dw_builder=module.dw_builder)
        schedule = get_schedule_class(name)(stage, 4, nn.MSELoss())
        batch, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        schedule.step(batch, target=target)
        actions = [action[1:] for action in schedule.plan().actions[rank] if action[1] in "IWB" and len(action) == 3]
        assert any(action[0] == ("W" if name == "ZB-H1" else "B") for action in actions)
        expected = []
        for action in actions:  # microbatches come back in order
            expected += {"I": [f"build {action[1]}"], "W": [f"run {action[1]}"]}.get(
                action[0], [f"build {action[1]}", f"run {action[1]}"]
            )
        assert log == expected, (name, log, expected)


def test_what_is_put_off_runs_in_its_own_w_or_at_once_after_a_whole_backward() -> None:
    run_ranks(_log_order, 2, "gloo")


def _fail(rank: int, world_size: int) -> None:
    torch.manual_seed(2)
    n, batch, target = 4, torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    modules = [Deferred() for _ in range(world_size)]
    plain = copy.deepcopy(modules)
    module = modules[rank]
    stage = PipelineStage(module, rank, world_size, DEVICE, dw_builder=module.dw_builder)
    schedule = get_schedule_class("ZB-H1")(stage, n, nn.MSELoss())
    for failing in range(world_size):
        for where, text in (
            ("fail_in_build", "microbatch 2: backward for the inputs: ValueError: no runner"),
            ("fail_in_run", "microbatch 2: backward for the weights: ValueError: no weights"),
        ):
            module.built = 0
            if rank == failing:
                setattr(module, where, 2)
            with pytest.raises(RuntimeError) as raised:
                schedule.step(batch, target=target)
            assert f"rank {failing}, stage {failing}, {text}" in str(raised.value), raised.value
            assert "after that" not in str(raised.value), raised.value
            setattr(module, where, -1)
            module.put_off.clear()
            module.zero_grad()
            schedule.step(batch, target=target)
            alone, _, _ = train_alone([_plain(other) for other in plain], nn.MSELoss(), batch, target, n)
            assert_same_gradients(module, alone[rank], text, tolerance=2e-5)
    stage = PipelineStage(module, rank, world_size, DEVICE, dw_builder=lambda: None)
    with pytest.raises(RuntimeError, match=r"dw_builder returned a NoneType, expected a callable"):
        Schedule1F1B(stage, n, nn.MSELoss()).step(batch, target=target)
    groups = [dist.new_group([i]) for i in range(world_size)]
    wrapped = nn.parallel.DistributedDataParallel(Deferred(), process_group=groups[rank])
    stage = PipelineStage(wrapped, rank, world_size, DEVICE, dw_builder=module.dw_builder)
    with pytest.raises(NotImplementedError, match=f"stage {rank} has a dw_builder and is wrapped for data parallelism"):
        Schedule1F1B(stage, n, nn.MSELoss())


def _plain(module: nn.Module) -> nn.Module:
    other = Plain()
    other.load_state_dict(module.state_dict())
    return other


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_builder_or_what_it_returns_that_fails_is_an_error_on_all_ranks_and_the_next_step_runs(backend: str) -> None:
    run_ranks(_fail, 2, backend)
