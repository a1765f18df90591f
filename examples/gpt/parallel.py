"""The training on a grid of processes: replicas x pipeline stages."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import farandole
from farandole.ddp import DistributedDataParallel
from farandole.pipelining import PipelineStage, Schedule1F1B
from gpt.bubble import Bubble, TracedStep, bubble_of
from gpt.model import Gpt, loss_of
from gpt.recipe import Recipe, set_rate
from gpt.text import Text

TRACED_STEPS = 20  # the last ones, over which the bubble is measured
BUCKET = 128 * 1024  # weights: small, so that several reductions of a stage overlap with its backward


@dataclasses.dataclass
class Finding:
    """What the reporting process knows at the end."""

    model: Gpt  # whole
    transports: dict[tuple[int, int], str]
    bubble: Bubble


class Pipeline:
    """This process's stage of its replica. `reports` is true in one process, which knows the losses."""

    def __init__(self, recipe: Recipe, stages: int, microbatches: int):
        self.recipe = recipe
        self.stages = stages
        self.microbatches = microbatches
        self.replicas = dist.get_world_size() // stages
        mesh = dist.init_device_mesh("cpu", (self.replicas, stages), mesh_dim_names=("data", "pipeline"))
        self.data_group = mesh.get_group("data")
        self.pipeline_group = mesh.get_group("pipeline")
        self.replica, self.stage = mesh.get_coordinate()
        self.is_first, self.is_last = self.stage == 0, self.stage == stages - 1
        self.reports = self.is_last and self.replica == 0

        self.part = Gpt(recipe.shape, recipe.seed, self.stage, stages)
        replicated = DistributedDataParallel(self.part, process_group=self.data_group, bucket_size=BUCKET)
        stage = PipelineStage(replicated, self.stage, stages, torch.device("cpu"), group=self.pipeline_group)
        self.schedule = Schedule1F1B(stage, microbatches, loss_fn=loss_of)
        self.optimizer = recipe.optimizer(self.part)
        self.traced: list[TracedStep] = []

    def train(self, text: Text, tick: Callable[[int, float], None]) -> list[float]:
        """Calls tick(step, loss) after each step. Losses are known in the last stage only."""
        losses = []
        for step in range(self.recipe.steps):
            inputs, targets = text.batch(step, self.recipe.batch, self.recipe.shape.length, self.recipe.seed)
            set_rate(self.optimizer, self.recipe.rate(step))
            self.optimizer.zero_grad()
            loss = self._step(inputs.chunk(self.replicas)[self.replica], targets.chunk(self.replicas)[self.replica])
            self.optimizer.step()
            if step >= self.recipe.steps - TRACED_STEPS:
                self.traced.append(TracedStep(self.schedule.last_step_trace(), self.schedule.last_step_bubble()))
            if loss is not None:
                losses.append(loss)
                tick(step, loss)
        return losses

    def _step(self, inputs: torch.Tensor, targets: torch.Tensor) -> float | None:
        """Forward and backward of this replica's rows; the loss over all replicas, in the last stage."""
        parts: list[torch.Tensor] = []
        options: dict[str, Any] = {"target": targets, "losses": parts} if self.is_last else {}
        self.schedule.step(*([inputs] if self.is_first else []), return_outputs=False, **options)
        if not self.is_last:
            return None
        mean = torch.stack(parts).detach().mean()
        dist.all_reduce(mean, group=self.data_group)
        return mean.item() / self.replicas

    def collect(self) -> Finding | None:
        """Brings what is to be reported to the process that reports; None elsewhere."""
        transports = _gather(_transports(), None, self.stages - 1)
        if self.replica != 0:
            return None
        parts = _gather((self.part.state_dict(), self.traced), self.pipeline_group, self.stages - 1)
        if parts is None or transports is None:
            return None
        model = Gpt(self.recipe.shape, self.recipe.seed)
        model.load_state_dict({name: value for weights, _ in parts for name, value in weights.items()})
        bubble = bubble_of(self.schedule.plan(), [traced for _, traced in parts])
        pairs = {(rank, peer): name for rank, peers in enumerate(transports) for peer, name in peers.items()}
        return Finding(model, pairs, bubble)


def _transports() -> dict[int, str]:
    """From this rank to each peer; gloo has TCP only."""
    if dist.get_backend() == "farandole":
        return farandole.transport_report(dist.group.WORLD)
    return {peer: dist.get_backend() for peer in range(dist.get_world_size()) if peer != dist.get_rank()}


def _gather(value: Any, group: dist.ProcessGroup | None, to: int) -> list[Any] | None:
    """The values of all ranks of the group, at its member `to`."""
    here = dist.get_rank(group)
    parts: list[Any] | None = [None] * dist.get_world_size(group) if here == to else None
    dist.gather_object(value, parts, group=group, group_dst=to)
    return parts
