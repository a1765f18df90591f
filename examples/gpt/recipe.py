"""What the pipelined training and the plain one have in common: optimizer, learning rate, seeds."""

import dataclasses
import math
from collections.abc import Callable

import torch
from torch import nn

from gpt.model import Gpt, Shape, loss_of
from gpt.text import Text


@dataclasses.dataclass(frozen=True)
class Recipe:
    shape: Shape
    batch: int  # rows of a step, over all replicas
    steps: int
    learning_rate: float
    warmup: int
    seed: int

    def rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.55 + 0.45 * math.cos(math.pi * done))

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=self.learning_rate, betas=(0.9, 0.98), weight_decay=0.05)


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def train_plainly(recipe: Recipe, text: Text, steps: int, tick: Callable[[int, float], None]) -> list[float]:
    """The same training in this process alone, whole batches at once: the losses of the first steps."""
    model = Gpt(recipe.shape, recipe.seed)
    optimizer = recipe.optimizer(model)
    losses = []
    for step in range(steps):
        inputs, targets = text.batch(step, recipe.batch, recipe.shape.length, recipe.seed)
        set_rate(optimizer, recipe.rate(step))
        optimizer.zero_grad()
        loss = loss_of(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        tick(step, losses[-1])
    return losses
