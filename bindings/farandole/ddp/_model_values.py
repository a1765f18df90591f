"""Which tensor of a checkpoint is which parameter of the models."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from farandole.ddp._wrapper import DistributedDataParallel


def values_of(
    models: Sequence[DistributedDataParallel], state_dict: Mapping[str, Any], wanted: Collection[torch.Tensor]
) -> dict[torch.Tensor, torch.Tensor]:
    """For each parameter that is wanted, as Megatron-core finds it: by the one name that ends with the parameter's.

    Raises:
        ValueError: there is none, or several, or it has another shape.
    """
    values: dict[torch.Tensor, torch.Tensor] = {}
    for model, chunk in zip(models, _by_model(state_dict, len(models)), strict=True):
        for name, parameter in model._trainable.items():
            if parameter not in wanted:
                continue
            found = [key for key in chunk if key == name] or [key for key in chunk if key.endswith("." + name)]
            if len(found) != 1:
                raise ValueError(f"state_dict has {found or 'nothing'} for parameter '{name}': expected one tensor")
            value = chunk[found[0]]
            if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                what = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
                raise ValueError(f"state_dict['{found[0]}'] is {what}: expected a tensor of {tuple(parameter.shape)}")
            values[parameter] = value
    return values


def _by_model(state_dict: Mapping[str, Any], count: int) -> list[Mapping[str, Any]]:
    for prefix in ("model", "model_"):
        keys = [f"{prefix}{index}" for index in range(count)]
        if keys[0] in state_dict:
            missing = [key for key in keys if key not in state_dict]
            if missing:
                raise ValueError(f"state_dict has no {missing[0]!r}: expected {keys}")
            return [state_dict[key] for key in keys]
    if count > 1:
        raise ValueError(f"state_dict has {sorted(state_dict)[:3]}: expected 'model0' to 'model{count - 1}'")
    return [state_dict.get("model", state_dict)]
