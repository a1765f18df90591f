"""What the loss of each microbatch counts for in the gradients of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

LossWeights: TypeAlias = Sequence[float] | torch.Tensor


def loss_scales(weights: LossWeights, n_microbatches: int, copies: int, scale_grads: bool) -> list[float]:
    """The gradient of each microbatch's loss.

    With scale_grads the weights are brought to a sum of 1, else they are the gradients. Each of several copies of a
    model has a part of the microbatches: their gradients are averaged, so that each counts for as many times its own.

    Raises:
        TypeError, ValueError: weights that are no weights, or that are not one for each microbatch.
    """
    listed = weights.tolist() if isinstance(weights, torch.Tensor) else weights
    if not isinstance(listed, (list, tuple)):
        raise TypeError(
            f"loss_weights is a {type(weights).__name__}, expected a list of n_microbatches={n_microbatches}"
        )
    if len(listed) != n_microbatches:
        raise ValueError(f"loss_weights has {len(listed)} entries, expected n_microbatches={n_microbatches}")
    numbers = [_weight(weight, index) for index, weight in enumerate(listed)]
    if not scale_grads:
        return numbers
    total = math.fsum(numbers)
    if not 0 < total < math.inf:
        raise ValueError(f"loss_weights have the sum {total}, expected a positive one")
    return [copies * number / total for number in numbers]


def _weight(weight: Any, index: int) -> float:
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"loss_weights[{index}] is a {type(weight).__name__}, expected a number") from None
    if not 0 <= number < math.inf:
        raise ValueError(f"loss_weights[{index}] is {number}, expected a finite number of at least 0")
    return number
