"""Stages hand over more than tensors: nested structures, None, numbers, texts, objects of the user's."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from farandole.pipelining import PipelineStage, Schedule1F1B, get_schedule_class, plan
from pipelining.pipeline_support import BACKENDS, assert_same_gradients
from support.devices import DEVICE
from support.processes import run_ranks

WIDTH = 5


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor | None


@dataclass
class Bag:
    tensor: torch.Tensor
    label: str


class ToDict(nn.Module):
    """A tensor to a dict, which the next stage gets as its only argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = torch.tanh(self.linear(x))
        return {
            "pair": Pair(y, None),
            "list": [y * 2, [torch.arange(len(x)), 3]],
            "bag": Bag(y.sin(), "a" * int(self.factor)),
            "again": y,
            "ordered": OrderedDict(mask=x > 0, factor=self.factor, name="dict", nothing=None),
        }


class FromDict(nn.Module):
    """A dict to a tuple with what is no tensor, which is spread over the arguments of the next stage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: dict[str, Any]) -> tuple[Any, ...]:
        pair, (doubled, (numbers, three)), bag, more = given["pair"], given["list"], given["bag"], given["ordered"]
        assert type(pair) is Pair and pair.second is None and three == 3
        assert type(bag) is Bag and bag.label == "a" * int(more["factor"])
        assert type(more) is OrderedDict and more["name"] == "dict" and more["nothing"] is None
        assert given["again"] is pair.first
        assert numbers.dtype == torch.int64 and more["mask"].dtype == torch.bool
        y = self.linear(pair.first + doubled + bag.tensor) * more["mask"] * more["factor"] + numbers[:, None]
        return y, None, {"half": y / 2, "factor": more["factor"]}, "end"


class FromTuple(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, y: torch.Tensor, nothing: None, more: dict[str, Any], end: str) -> torch.Tensor:
        assert nothing is None and end == "end"
        return self.linear(y + more["half"]) * more["factor"]


def _modules() -> list[nn.Module]:
    torch.manual_seed(3)
    return [ToDict(), FromDict(), FromTuple(), nn.Linear(WIDTH, WIDTH)]


def _train_alone(modules: list[nn.Module], batch: torch.Tensor, target: torch.Tensor, n: int) -> list[nn.Module]:
    alone = copy.deepcopy(modules)
    for module in alone:
        module.zero_grad()
    for x, y in zip(batch.tensor_split(n), target.tensor_split(n), strict=True):
        first, second, third, fourth = alone
        nn.functional.mse_loss(fourth(third(*second(first(x)))), y).backward(torch.tensor(1 / n))
    return alone


def _train(rank: int, world_size: int) -> None:
    n = 5
    for name in ("1F1B", "ZB-H1") if world_size == 4 else ("Interleaved1F1B", "InterleavedZeroBubble", "ZBV"):
        modules = _modules()
        owners = plan(name, 4, n, num_ranks=world_size).rank_of_stage
        stages = [PipelineStage(modules[i], i, 4, DEVICE) for i, owner in enumerate(owners) if owner == rank]
        schedule = get_schedule_class(name)(stages[0] if world_size == 4 else stages, n, nn.MSELoss())
        for rows, factor in ((10, 2.0), (10, 3.0), (10, 1.5), (13, 4.0)):
            modules[0].factor = factor
            batch, target = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
            for module in modules:
                module.zero_grad()
            output = schedule.step(batch, target=target)
            alone = _train_alone(modules, batch, target, n)
            for stage in stages:
                where = f"{name}, {rows} rows, factor {factor}, stage {stage.stage_index}"
                assert_same_gradients(stage.submod, alone[stage.stage_index], where, tolerance=2e-5)
            evaluated = schedule.eval(batch)
            assert output is None if owners[3] != rank else torch.equal(output, evaluated)


@pytest.mark.sample(2)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_structures_flow_between_stages_and_their_values_may_change(backend: str, world_size: int) -> None:
    run_ranks(_train, world_size, backend)


class Returns(nn.Module):
    """The output of a linear layer, with something beside it."""

    def __init__(self, beside: Any):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.beside = beside

    def forward(self, x: torch.Tensor, *_: Any) -> Any:
        if isinstance(self.beside, Exception):
            raise self.beside
        y = self.linear(x)
        return y if self.beside == "no" else (y, self.beside)


class TakesAnything(Returns):
    def __init__(self) -> None:
        super().__init__("no")


def _step(schedule: Any) -> str:
    try:
        schedule.step(torch.ones(6, WIDTH), target=torch.ones(6, WIDTH))
        return ""
    except RuntimeError as error:
        return str(error)


def _change(rank: int, world_size: int) -> None:
    modules = [Returns("a"), TakesAnything(), TakesAnything()]
    schedule = Schedule1F1B(PipelineStage(modules[rank], rank, world_size, DEVICE), 3, nn.MSELoss())
    assert _step(schedule) == ""
    for beside, expected in (
        ("a" * 300, ""),  # there is room for twice as much, in whole blocks
        ("a" * 600, "the module returned beside tensors takes 768 bytes, expected at most 512 as in the step before"),
        ("a" * 600, ""),
        ("a", ""),  # smaller than in the step that learned
        ("no", "the outputs are (float32[2, 5] requires grad), expected (float32[2, 5] requires grad, packet[1536])"),
        ("no", ""),
        ("a", "requires grad, packet[256]), expected (float32[2, 5] requires grad) as in the step before"),
        ("a", ""),
        (None, ""),
        (torch.ones(2, dtype=torch.int64), "the outputs are (float32[2, 5] requires grad, int64[2]), expected"),
        (torch.ones(2, dtype=torch.int64), ""),
        (ValueError("it broke"), "forward: ValueError: it broke"),
        ([None], ""),
        (ValueError("it broke"), "forward: ValueError: it broke"),  # in a step that learns nothing
        ({"x": None}, ""),
        (iter(()), ""),
        ((i for i in ()), "cannot pickle 'generator' object"),
    ):
        modules[0].beside = beside
        error = _step(schedule)
        assert expected in error and (expected != "" or error == ""), (beside, expected, error)
        if error:
            assert (
                f"rank 0, stage 0, microbatch 0: {expected[:8]}" in error
                or "microbatch 0: what" in error
                or ("microbatch 0: the outputs" in error or "microbatch 0: forward" in error)
            ), error
            assert "after that" not in error, error


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_structure_that_changes_is_an_error_that_says_so_and_the_next_step_runs(backend: str) -> None:
    run_ranks(_change, 3, backend)


class Join(nn.Module):
    """Three stages before it: a dict, a tensor, a tuple with a number in it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: dict[str, Any], x: torch.Tensor, y: torch.Tensor, number: float) -> dict[str, Any]:
        return {"sum": self.linear(given["x"] + x + y * number)}


class AsDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"x": self.linear(x), "unused": 1}


def _join(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    modules = [AsDict(), nn.Linear(WIDTH, WIDTH), Returns(2.0), Join()]
    alone = copy.deepcopy(modules)
    edges = [(0, 3), (1, 3), (2, 3)]
    owners = plan("Interleaved1F1B", 4, 3, num_ranks=world_size, edges=edges).rank_of_stage
    stages = [PipelineStage(modules[i], i, 4, DEVICE) for i, owner in enumerate(owners) if owner == rank]

    def loss_of(output: dict[str, Any], target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output["sum"], target)

    schedule = get_schedule_class("Interleaved1F1B")(stages, 3, loss_of, edges=edges)
    batch, target = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    for x, y in zip(batch.tensor_split(3), target.tensor_split(3), strict=True):
        loss_of(alone[3](alone[0](x), alone[1](x), *alone[2](x)), y).backward(torch.tensor(1 / 3))
    for _ in range(2):
        for stage in stages:
            stage.submod.zero_grad()
        output = schedule.step(batch, target=target)
        for stage in stages:
            assert_same_gradients(stage.submod, alone[stage.stage_index], stage.stage_index, tolerance=2e-5)
        if owners[3] == rank:
            assert output["sum"].shape == (6, WIDTH) and not output["sum"].requires_grad
    chosen = [(0, 3, [0]), (1, 3), (2, 3)]
    schedule = get_schedule_class("Interleaved1F1B")(stages, 3, loss_of, edges=chosen)
    with pytest.raises(RuntimeError) as raised:
        schedule.step(batch, target=target)
    text = "stage 0, microbatch 0: the module returned more than tensors, expected a tensor or a tuple of tensors: "
    assert f"{text}only some of the outputs go to stage 3" in str(raised.value), raised.value


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_stages_before_one_give_their_arguments_and_chosen_outputs_are_tensors(backend: str) -> None:
    run_ranks(_join, 2, backend)


def _declare(rank: int, world_size: int) -> None:
    modules = [AsDict(), FromX()]
    good, bad = torch.empty(2, WIDTH), torch.empty(2, WIDTH + 1)
    for given, text in (
        (good, ""),
        (bad, "the inputs are (float32[2, 5] requires grad, packet[512]), expected as decl"),
    ):
        stage = PipelineStage(modules[rank], rank, world_size, DEVICE, **({"input_args": given} if rank == 1 else {}))
        error = _step(Schedule1F1B(stage, 3, nn.MSELoss()))
        assert text in error and (text != "" or error == ""), error


class FromX(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: dict[str, Any]) -> torch.Tensor:
        return self.linear(given["x"])


def test_declared_tensors_are_those_of_the_structure() -> None:
    run_ranks(_declare, 2, "gloo")
