"""What a stage may do with its inputs, which are to it what a layer's are in one model: change them in place, which who
else reads them does not see, put hooks on them, and have their gradients come from collectives.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch import nn

from farandole.pipelining import PipelineStage, get_schedule_class, plan
from pipelining.pipeline_support import BACKENDS, assert_same_gradients, train_alone
from support.devices import DEVICE
from support.processes import run_ranks

WIDTH = 6


class _Shares(nn.Module):
    """Returns a tensor twice, and its own weight."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x)
        return y, y[:, :3], self.linear.weight[:2]


class _Changes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.add_(1).mul_(3))


class _Joins(nn.Module):
    def forward(self, skipped: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x * skipped.mul_(0.5).sum() + weight.mul_(2).sum()


class _Net(nn.Module):
    """The same in one process, where each reader of a tensor has its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.stages = nn.ModuleList([_Shares(), _Changes(), _Changes(), _Joins()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        whole, part, weight = self.stages[0](x)
        x = self.stages[2](self.stages[1](whole.clone()))
        return self.stages[3](part.clone(), weight.clone(), x)


def _train(rank: int, world_size: int) -> None:
    for name in ("Interleaved1F1B", "InterleavedZeroBubble"):
        net = _Net()
        alone = copy.deepcopy(net)
        owners = plan(name, 4, 5, num_ranks=world_size).rank_of_stage
        stages = [PipelineStage(net.stages[i], i, 4, DEVICE) for i, owner in enumerate(owners) if owner == rank]
        edges = [(0, 1, [0]), (0, 3, [1, 2]), (1, 2), (2, 3)]
        schedule = get_schedule_class(name)(stages, 5, nn.MSELoss(), edges=edges)
        for rows in (10, 10, 13):
            batch, target = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
            net.zero_grad()
            alone.zero_grad()
            trained, losses, output = train_alone([alone], nn.MSELoss(), batch, target, 5)
            mine: list[torch.Tensor] = []
            result = schedule.step(batch, target=target, losses=mine)
            for index, owner in enumerate(owners):
                if owner == rank:
                    where = f"{name}, {rows} rows, stage {index}"
                    assert_same_gradients(net.stages[index], trained[0].stages[index], where, tolerance=1e-5)
            if owners[3] == rank:
                torch.testing.assert_close(torch.stack(mine), torch.stack(losses))
                torch.testing.assert_close(result, output)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_stage_changes_its_own_of_what_several_read(backend: str, world_size: int) -> None:
    run_ranks(_train, world_size, backend)


class _GivesTwice(nn.Module):
    def __init__(self, gives_view: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gives_view = gives_view

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return y, (y[:, :3] if self.gives_view else y)


class _ChangesOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, again: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return self.linear(x) * again.sum(1, keepdim=True)


def _change_one_of_two(rank: int, world_size: int) -> None:
    for gives_view in (False, True):
        torch.manual_seed(7)
        stages = [_GivesTwice(gives_view), _ChangesOne()]
        alone = copy.deepcopy(stages)
        batch, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
        for x, y in zip(batch.chunk(4), target.chunk(4), strict=True):
            whole, again = alone[0](x)
            (nn.functional.mse_loss(alone[1](whole.clone(), again.clone()), y) / 4).backward()
        own = [PipelineStage(stages[i], i, 2, DEVICE) for i in range(2) if i % world_size == rank]
        schedule = get_schedule_class("Interleaved1F1B")(own, 4, nn.MSELoss())
        for _ in range(2):
            for stage in stages:
                stage.zero_grad()
            schedule.step(batch, target=target)
            for stage in own:
                assert_same_gradients(stage.submod, alone[stage.stage_index], f"view {gives_view}", tolerance=1e-5)


@pytest.mark.parametrize("world_size", [1, 2])
def test_two_outputs_over_one_edge_have_memory_of_their_own(world_size: int) -> None:
    run_ranks(_change_one_of_two, world_size, "farandole")


class _Hooks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.hooks = True
        self.seen: list[torch.Tensor] = []
        self.inputs: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.hooks:
            x.register_hook(self.seen.append)
            x.retain_grad()
            self.inputs.append(x)
        return self.linear(x)


def _put_hooks(rank: int, world_size: int) -> None:
    torch.manual_seed(5)
    stages = [nn.Linear(WIDTH, WIDTH), _Hooks()]
    schedule = get_schedule_class("1F1B")(PipelineStage(stages[rank], rank, 2, DEVICE), 4, nn.MSELoss())
    batch, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    for hooks in (True, True, False, True):
        stages[1].hooks = hooks
        alone = copy.deepcopy(stages)
        for stage in alone:
            stage.zero_grad()
        alone, _, _ = train_alone(alone, nn.MSELoss(), batch, target, 4)
        for stage in stages:
            stage.zero_grad()
        schedule.step(batch, target=target)
        assert_same_gradients(stages[rank], alone[rank], f"hooks {hooks}")
        if rank == 1:
            assert len(stages[1].seen) == len(stages[1].inputs) == 4 * hooks
            for ours, theirs in zip(stages[1].seen, alone[1].seen, strict=True):
                assert torch.equal(ours, theirs)
            for ours, theirs in zip(stages[1].inputs, alone[1].inputs, strict=True):
                assert torch.equal(ours.grad, theirs.grad)
            stages[1].seen.clear()
            stages[1].inputs.clear()


@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_on_an_input_are_called_for_its_microbatch_alone(backend: str) -> None:
    run_ranks(_put_hooks, 2, backend)


class _SumsGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        summed = functional_collectives.all_reduce(grad.contiguous(), "sum", [dist.get_rank()])
        assert type(summed) is functional_collectives.AsyncCollectiveTensor
        return summed


class _Summing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(_SumsGradients.apply(x))


def _sum_gradients(rank: int, world_size: int) -> None:
    dist.new_group([0]), dist.new_group([1])
    torch.manual_seed(5)
    stages = [nn.Linear(WIDTH, WIDTH), _Summing()]
    batch, target = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    for name in ("1F1B", "ZB-H1"):
        schedule = get_schedule_class(name)(PipelineStage(stages[rank], rank, 2, DEVICE), 4, nn.MSELoss())
        for _ in range(2):
            alone, _, _ = train_alone([copy.deepcopy(stages[0]), stages[1].linear], nn.MSELoss(), batch, target, 4)
            schedule.step(batch, target=target)
            mine = stages[rank] if rank == 0 else stages[1].linear
            assert_same_gradients(mine, alone[rank], name)
            for stage in stages:
                stage.zero_grad()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_inputs_may_come_from_a_collective(backend: str) -> None:
    run_ranks(_sum_gradients, 2, backend)
