"""Graphs that are older than a step."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def note_step(parameters: Iterable[torch.Tensor]) -> None:
    """These were stepped, by writing to other tensors in the same memory, here and on other ranks: the backward of a graph
    that has kept one raises all the same, as after the step of torch's optimizers."""
    torch.autograd.graph.increment_version([one for one in parameters if _is_stepped(one)])


def _is_stepped(parameter: torch.Tensor) -> bool:
    place = getattr(parameter, "main_grad_place", "grad")
    return parameter.requires_grad and (place != "grad" or parameter.grad is not None)
