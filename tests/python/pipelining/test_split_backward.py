"""Inputs' and weights' gradients apart: beside checkpoints, compiled modules, Python functions and hooks of the user's."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from farandole.pipelining import PipelineStage, ScheduleZBH1
from pipelining.pipeline_support import assert_same_gradients, train_alone
from support.devices import DEVICE
from support.processes import run_ranks

MICROBATCHES = 4


class Counted(torch.autograd.Function):
    """x * w, and how often its backward ran."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        Counted.backwards += 1
        x, w = ctx.saved_tensors
        return grad * w, grad * x


class Middle(nn.Module):
    """A stage with two linear layers, the second of them run by `around`, and a count of its forwards."""

    def __init__(self, around: Callable[[Callable[..., Any], torch.Tensor], Any], counted: bool = False):
        super().__init__()
        self.first, self.second, self.scale = nn.Linear(8, 8), nn.Linear(8, 8), nn.Parameter(torch.rand(8) + 0.5)
        self.around, self.counted, self.forwards = around, counted, 0

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return torch.tanh(self.second(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.around(self.inner, torch.sin(self.first(x)))
        return Counted.apply(x, self.scale) if self.counted else x


def _plainly(inner: Callable[..., Any], x: torch.Tensor) -> Any:
    return inner(x)


def _checkpointed(inner: Callable[..., Any], x: torch.Tensor) -> Any:
    return checkpoint(inner, x, use_reentrant=False)


def _checkpointed_reentrantly(inner: Callable[..., Any], x: torch.Tensor) -> Any:
    return checkpoint(inner, x, use_reentrant=True)


def _compiled(inner: Callable[..., Any], x: torch.Tensor) -> Any:
    return torch.compile(inner, backend="aot_eager")(x)


AROUND = {
    "plainly": _plainly,
    "checkpoint": _checkpointed,
    "reentrant checkpoint": _checkpointed_reentrantly,
    "compile": _compiled,
}
LINEAR = {"first.weight", "first.bias", "second.weight", "second.bias"}
EARLY = {  # parameters whose gradients come with the inputs', and what the warning names
    "plainly": (set(), None),
    "checkpoint": ({"second.weight", "second.bias"}, "AddmmBackward0"),
    "reentrant checkpoint": (LINEAR, "CheckpointFunctionBackward"),
    "compile": (LINEAR, "CompiledFunctionBackward"),
}


def _train(rank: int, world_size: int, around: str, counted: bool) -> None:
    torch.manual_seed(1)
    stages: list[nn.Module] = [nn.Linear(8, 8), Middle(AROUND[around], counted), nn.Linear(8, 8)]
    middle = stages[1]
    order: list[str] = []
    if rank == 1:
        for name, parameter in middle.named_parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, name=name: order.append(name))
    schedule = ScheduleZBH1(PipelineStage(stages[rank], rank, 3, DEVICE), MICROBATCHES, nn.MSELoss())
    batch, target = torch.randn(8, 8), torch.randn(8, 8)
    for step in range(3):
        alone, _, _ = train_alone(copy.deepcopy(stages), nn.MSELoss(), batch, target, MICROBATCHES)
        forwards, Counted.backwards = middle.forwards, 0
        order.clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            schedule.step(batch, target=target)
        assert_same_gradients(stages[rank], alone[rank], f"{around}, step {step}, rank {rank}", tolerance=2e-5)
        stages[rank].zero_grad()
        if rank != 1:
            continue
        assert Counted.backwards == (MICROBATCHES if counted else 0)
        again = 2 if "checkpoint" in around else 1
        if around != "compile":
            assert middle.forwards - forwards == again * MICROBATCHES
        early, node = EARLY[around]
        early = early | ({"scale"} if counted else set())
        late = [name for name, _ in middle.named_parameters() if name not in early]
        late = [name for name in late if name != "scale" or counted]
        # The warm-up is longer than a microbatch: an early gradient comes before that of a late one of the same.
        assert sorted(order) == sorted([*early, *late] * MICROBATCHES)
        if early and late:
            assert set(order[: len(early)]) == early, order
            assert set(order[-len(late) :]) == set(late), order
        told = [str(warning.message) for warning in caught if "cannot be split" in str(warning.message)]
        expected = step == 0 and bool(node or counted)
        assert len(told) == expected, told
        if expected:
            named = node if node and not counted else ""
            assert told[0].startswith(f"stage 1: the backward of {named}"), told


@pytest.mark.sample(3)
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("around", list(AROUND))
def test_what_cannot_be_split_is_computed_once_and_said_once(around: str, counted: bool) -> None:
    run_ranks(_train, 3, "gloo", timeout=120, around=around, counted=counted)


def _switch_on(rank: int, world_size: int) -> list[tuple[int, int]]:
    stages: list[nn.Module] = [nn.Linear(8, 8), Middle(_plainly)]
    middle = stages[1]
    schedule = ScheduleZBH1(PipelineStage(stages[rank], rank, 2, DEVICE), MICROBATCHES, nn.MSELoss())
    counts = []
    for step in range(3):
        middle.around = _checkpointed if step > 0 else _plainly
        middle.forwards = 0
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            schedule.step(torch.randn(8, 8), target=torch.randn(8, 8))
        counts.append((middle.forwards, len([w for w in caught if "cannot be split" in str(w.message)])))
    return counts


def test_checkpoints_that_are_switched_on_later_are_computed_once_more_and_said_once() -> None:
    counts = run_ranks(_switch_on, 2, "gloo")[1]
    assert counts == [(MICROBATCHES, 0), (2 * MICROBATCHES, 1), (2 * MICROBATCHES, 0)]


def _reduce_between_replicas(rank: int, world_size: int, wrapper: str) -> None:
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel as TorchDDP

    from farandole.ddp import DistributedDataParallel as OurDDP

    replica, place = divmod(rank, 2)
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    torch.manual_seed(1)
    stages: list[nn.Module] = [nn.Linear(8, 8), Middle(_checkpointed, True)]
    batches = [(torch.randn(8, 8), torch.randn(8, 8)) for _ in range(2)]
    alone = [train_alone(copy.deepcopy(stages), nn.MSELoss(), *batch, MICROBATCHES)[0][place] for batch in batches]
    wrap = TorchDDP if wrapper == "torch" else OurDDP
    module = wrap(stages[place], process_group=replicas[place])
    schedule = ScheduleZBH1(PipelineStage(module, place, 2, DEVICE, group=pipelines[replica]), 4, nn.MSELoss())
    for _ in range(2):
        module.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            schedule.step(batches[replica][0], target=batches[replica][1])
        for mine, one, other in zip(
            stages[place].parameters(), alone[0].parameters(), alone[1].parameters(), strict=True
        ):
            assert torch.allclose(mine.grad, (one.grad + other.grad) / 2, rtol=1e-4, atol=1e-6)
    assert not [w for w in caught if "cannot be split" in str(w.message)]


@pytest.mark.sample(1)
@pytest.mark.parametrize("wrapper", ["torch", "farandole"])
def test_a_stage_that_is_reduced_and_cannot_be_split_reduces_after_its_last_first_half(wrapper: str) -> None:
    run_ranks(_reduce_between_replicas, 4, "gloo", wrapper=wrapper)
