"""What is no use to a pipeline is refused by name: optimizers and groups of others, losses without a backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from farandole.sparse import EvalPipelineSparseDist, TrainPipelineBase, TrainPipelineSparseDist
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import Mean, drain, made, make_batches


class Returning(Mean):
    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self._change = change

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        losses, output = super().forward(batch)
        return self._change(losses), output


@pytest.mark.parametrize("change", [torch.Tensor.detach, lambda losses: losses.detach().long()])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_losses_that_need_no_gradient_are_refused_before_the_backward(change, is_frozen):
    model = Returning((lambda losses: losses) if is_frozen else change).to(DEVICE)
    model.weight.requires_grad_(not is_frozen)
    pipeline = TrainPipelineBase(model, torch.optim.SGD(model.parameters(), lr=0.1), DEVICE)
    with pytest.raises(
        ValueError, match=r"the model returned losses that need no gradient \(torch\..*not frozen, not det"
    ):
        pipeline.progress(iter([torch.ones(2)]))


def test_an_optimizer_of_another_model_is_refused():
    model, other = Mean().to(DEVICE), Mean().to(DEVICE)
    its_own, others = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, other))
    with pytest.raises(
        ValueError, match=r"^optimizer \(SGD\) has no parameter of this Mean: expected one of the model's"
    ):
        TrainPipelineBase(model, others, DEVICE)
    TrainPipelineBase(model, its_own, DEVICE)


class Nothing:
    """An optimizer without parameters, where all are updated in the backward."""

    def __init__(self) -> None:
        self.param_groups: list[Any] = []

    def step(self) -> None:
        pass

    def zero_grad(self) -> None:
        pass


def take_others(rank: int, world_size: int) -> None:
    model, optimizer = made(2)
    batches = make_batches(1, 4)
    group = dist.new_group([0])
    if rank == 1:
        with pytest.raises(ValueError, match=r"process_group is GroupMember\.NON_GROUP_MEMBER: this rank is not in"):
            TrainPipelineSparseDist(model, optimizer, DEVICE, process_group=group)
    for wrong in (-3, -100.0, "group"):
        with pytest.raises(TypeError, match=r"^process_group=.*: expected a torch\.distributed\.ProcessGroup, or None"):
            TrainPipelineSparseDist(model, optimizer, DEVICE, process_group=wrong)
    _, others = made(3)
    assert len(drain(EvalPipelineSparseDist(model, others, DEVICE), iter(batches))) == 4
    pipeline = TrainPipelineSparseDist(model, Nothing(), DEVICE)
    assert len(drain(pipeline, iter(batches))) == 4


def test_groups_of_others_are_refused_and_optimizers_without_parameters_taken():
    run_ranks(take_others, 2, "farandole")


def take_copies(rank: int, world_size: int) -> None:
    """The parameters of ours are copies, and parts of them."""
    module = Mean()
    model = DistributedDataParallel(module, use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    before = module.weight.item()
    drain(TrainPipelineBase(model, optimizer, DEVICE), iter([torch.ones(2)] * 3))
    assert module.weight.item() < before


def test_an_optimizer_that_steps_copies_is_taken():
    run_ranks(take_copies, 2, "farandole")
