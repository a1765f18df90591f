"""What holds a schedule and is held by it ends when nobody else has it."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from farandole.ddp import DistributedDataParallel
from farandole.pipelining import PipelineStage, Schedule1F1B
from support.devices import DEVICE
from support.processes import run_ranks


class LossOfATrainer:
    """Its loss is a method of the object that has the schedule."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.model = nn.Linear(3, 3)
        self.schedule = Schedule1F1B(PipelineStage(self.model, rank, world_size, DEVICE), 4, self.loss)

    def loss(self, output: Any, target: Any) -> Any:
        return nn.functional.mse_loss(output, target)


class ModelWithASchedule(LossOfATrainer, nn.Module):
    """The stage's module has the schedule."""

    def __init__(self, rank: int, world_size: int) -> None:
        nn.Module.__init__(self)
        self.layer = nn.Linear(3, 3)
        self.schedule = Schedule1F1B(PipelineStage(self, rank, world_size, DEVICE), 4, self.loss)

    def forward(self, x: Any) -> Any:
        return self.layer(x)


class Replicated(LossOfATrainer):
    """The stage's module is wrapped, so that the executor calls its wrapper, too."""

    own: Any = None

    def __init__(self, rank: int, world_size: int) -> None:
        self.model = DistributedDataParallel(nn.Linear(3, 3), process_group=Replicated.own)
        self.model.trainer = self
        self.schedule = Schedule1F1B(PipelineStage(self.model, rank, world_size, DEVICE), 4, self.loss)


def _free(rank: int, world_size: int) -> None:
    Replicated.own = [dist.new_group([other]) for other in range(world_size)][rank]
    for make in (LossOfATrainer, ModelWithASchedule, Replicated):
        for steps in (0, 2):
            trainer = make(rank, world_size)
            for _ in range(steps):
                batch = torch.ones(8, 3)
                given = (batch,) if rank == 0 else ()
                trainer.schedule.step(*given, target=batch if rank == world_size - 1 else None)
                gc.collect()  # while it is in use nothing ends
            gone = [weakref.ref(one) for one in (trainer, trainer.schedule)]
            del trainer
            gc.collect()
            assert [one() for one in gone] == [None] * 2, (make.__name__, steps)


def test_nothing_is_left_of_a_schedule_that_its_holder_alone_has():
    run_ranks(_free, 2, "farandole")
