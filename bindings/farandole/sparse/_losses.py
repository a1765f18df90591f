"""What a model returns: (losses, output)."""

from __future__ import annotations

from typing import Any

import torch


def outcome_of(result: Any, has_backward: bool) -> tuple[Any, Any]:
    """
    Raises:
        TypeError: it is no pair, or its losses, which a backward is to follow, are no tensor.
    """
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise TypeError(f"the model returned {_described(result)}: expected (losses, output), losses a tensor")
    losses, output = result
    if has_backward and not isinstance(losses, torch.Tensor):
        raise TypeError(
            f"the model returned (losses, output), losses a {type(losses).__name__}: expected a tensor, one for each "
            "sample, or one for all"
        )
    return losses, output


def share_of_window(losses: torch.Tensor, window: int) -> torch.Tensor:
    """Divided by the batches of a window.

    Raises:
        ValueError: they are not one for each sample, or one for all; or nothing that is trained has part in them.
    """
    if losses.shape[1:].numel() != 1:  # on a rank with one sample torch would take some of these
        raise ValueError(
            f"the model returned losses of shape {tuple(losses.shape)}: expected one for each sample, or one for all"
        )
    if not losses.requires_grad:
        raise ValueError(
            f"the model returned losses that need no gradient ({losses.dtype}): expected such as come from parameters that "
            "are not frozen, not detached and made with gradients on; model.eval() is for batches without a backward"
        )
    return losses / window if window > 1 else losses


def _described(result: Any) -> str:
    if isinstance(result, (tuple, list)):
        return f"a {type(result).__name__} of {len(result)}"
    return f"a {type(result).__name__}"
