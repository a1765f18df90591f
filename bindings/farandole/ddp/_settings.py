"""Learning rates and the like, of an optimizer and of the one that it wraps."""

from __future__ import annotations

from typing import Any

import torch


def copy_settings(source: list[dict[str, Any]], target: list[dict[str, Any]]) -> None:
    """Learning rates and the like, where schedulers and the optimizer have different groups."""
    for theirs, ours in zip(source, target, strict=True):
        if theirs is not ours:
            ours.update({key: value for key, value in theirs.items() if key != "params"})


def settings_of(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def kept_settings(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As settings_of, with copies of tensors beside them, for restore_settings()."""
    return [
        {key: (value, value.clone() if isinstance(value, torch.Tensor) else None) for key, value in group.items()}
        for group in settings_of(groups)
    ]


def restore_settings(groups: list[dict[str, Any]], kept: list[dict[str, Any]]) -> None:
    """They are what they were, also where tensors were changed in place, or some were added."""
    for group, settings in zip(groups, kept, strict=True):
        for key in group.keys() - settings.keys() - {"params"}:
            del group[key]
        for key, (value, copy) in settings.items():
            group[key] = value
            if copy is not None:
                with torch.no_grad():
                    value.copy_(copy)


def counters_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The numbers among its attributes, which may count steps."""
    return {name: value for name, value in vars(optimizer).items() if isinstance(value, (int, float))}


def agree_on_settings(ours: list[dict[str, Any]], inner: list[dict[str, Any]], last: list[dict[str, Any]]) -> None:
    """What was changed in either since both were ``last``, by a scheduler of one of them, counts in both."""
    if len(inner) != len(ours):
        raise RuntimeError(
            f"the optimizer that a DistributedOptimizer was made of has {len(inner)} param groups, and had {len(ours)} then: "
            "expected all from the start, or a second DistributedOptimizer over the same model"
        )
    for mine, theirs, before in zip(ours, inner, last, strict=True):
        if mine is theirs:
            continue
        for key in (mine.keys() | theirs.keys()) - {"params"}:
            is_mine = key in mine and not (key in before and _is_same(mine[key], before[key]))
            mine[key] = theirs[key] = mine[key] if is_mine or key not in theirs else theirs[key]


def _is_same(one: Any, other: Any) -> bool:
    # A learning rate that is a tensor changes in place.
    holds_tensor = isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor)
    return one is other or (not holds_tensor and bool(one == other))
