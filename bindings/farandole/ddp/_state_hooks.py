"""Hooks that are registered with an optimizer, around the saving and the loading of its state, as torch calls them."""

from __future__ import annotations

import copy
from typing import Any

import torch


def before_saving(optimizer: torch.optim.Optimizer) -> None:
    for hook in optimizer._optimizer_state_dict_pre_hooks.values():
        hook(optimizer)


def after_saving(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """What they make of it."""
    for hook in optimizer._optimizer_state_dict_post_hooks.values():
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


def before_loading(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """What they make of it; the one that was given stays as it is."""
    state_dict = copy.copy(state_dict)
    for hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        changed = hook(optimizer, state_dict)
        state_dict = state_dict if changed is None else changed
    return state_dict


def after_loading(optimizer: torch.optim.Optimizer) -> None:
    for hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        hook(optimizer)
