"""What the pipelining tests share: the backends to run over, random models, the single-process oracle."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import farandole  # noqa: F401  (registers the backend)

BACKENDS = ["gloo"] + (["farandole"] if "farandole" in dist.Backend.backend_list else [])

# Schedules, of several stages on a rank and of one.
MULTI = ["Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBV", "V-Half", "V-Min", "DualPipeV"]
SINGLE = ["GPipe", "1F1B", "ZB-H1", "ZB-H2"]

_ACTIVATIONS: list[Callable[[], nn.Module]] = [nn.Tanh, nn.GELU, nn.Sigmoid, nn.Identity]
# Their backwards need what they were given, so that the next layer may change what they give.
_KEEP_INPUTS = (nn.GELU, nn.Identity)


def random_stages(
    rng: random.Random, num_stages: int, dtype: torch.dtype = torch.float32, in_place: bool = False
) -> list[nn.Module]:
    """Stages of random depth and width; the same on every rank for the same seed. With ``in_place`` some begin with a
    layer that changes what the stage is given.
    """
    torch.manual_seed(rng.randrange(2**31))
    width = rng.randint(1, 24)
    stages: list[nn.Module] = []
    for _ in range(num_stages):
        layers: list[nn.Module] = []
        if in_place and stages and isinstance(stages[-1][-1], _KEEP_INPUTS) and rng.random() < 0.7:
            layers.append(nn.LeakyReLU(0.3, inplace=True))
        for _ in range(rng.randint(1, 3)):
            following = rng.randint(1, 24)
            layers += [nn.Linear(width, following, bias=rng.random() < 0.7), rng.choice(_ACTIVATIONS)()]
            width = following
        stages.append(nn.Sequential(*layers).to(dtype))
    return stages


def train_alone(
    stages: list[nn.Module],
    loss_fn: Callable[..., torch.Tensor],
    batch: torch.Tensor,
    target: torch.Tensor,
    n_microbatches: int,
    scale: bool = True,
) -> tuple[list[nn.Module], list[torch.Tensor], torch.Tensor]:
    """One process, microbatch after microbatch: the stages with gradients, the losses, the outputs.

    Gradients are summed in the order in which the pipeline sums them: results are the same bits.
    """
    alone = copy.deepcopy(stages)
    losses, outputs = [], []
    for x, y in zip(batch.tensor_split(n_microbatches), target.tensor_split(n_microbatches), strict=True):
        for stage in alone:
            x = stage(x)
        loss = loss_fn(x, y)
        loss.backward(torch.full_like(loss, 1 / n_microbatches if scale else 1.0))
        losses.append(loss.detach())
        outputs.append(x.detach())
    return alone, losses, torch.cat(outputs)


def assert_same_gradients(actual: nn.Module, expected: nn.Module, context: Any, tolerance: float = 0.0) -> None:
    """The same bits in every parameter's gradient, or a relative error within the tolerance.

    A view arrives at the next stage as a dense tensor: where strides differ, kernels may sum in
    another order.
    """
    for (name, parameter), (_, other) in zip(actual.named_parameters(), expected.named_parameters(), strict=True):
        if other.grad is None:
            assert parameter.grad is None, f"{context}: {name} has a gradient, expected none"
            continue
        assert parameter.grad is not None, f"{context}: {name} has no gradient"
        error = (parameter.grad - other.grad).abs().max()
        assert error <= tolerance * other.grad.abs().max(), f"{context}: gradient of {name} differs by {error}"
