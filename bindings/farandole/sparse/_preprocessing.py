"""What sharded modules write to their inputs before input_dist: to copies, since the batch's forward is yet to come."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

Call = tuple[Any, dict[str, Any]]


def preprocessed(modules: Mapping[str, nn.Module], calls: Mapping[str, Call]) -> dict[str, Call]:
    """The calls of modules by name, in their order in a forward, each with what those before it have written.

    torchrec's feature processors of tables by row write positions into the weights of features, which other modules,
    before or behind them, may have as well.
    """
    written = _Written()
    done: dict[str, Call] = {}
    for name, (args, kwargs) in calls.items():
        module: Any = modules[name]
        writes = _writes(module)
        if writes:
            written.copy([part for part in (*args, *kwargs.values()) if hasattr(part, "weights_or_none")])
        now = list(map(written.now, args)), {key: written.now(part) for key, part in kwargs.items()}
        done[name] = module.preprocess_input(*now) if writes else now
    return done


def writes_inputs(modules: Mapping[str, nn.Module]) -> bool:
    """Whether any of them does."""
    return any(map(_writes, modules.values()))


def _writes(module: nn.Module) -> bool:
    """Whether it has more than what torchrec's ShardedModule has, which returns what it is given."""
    method = getattr(type(module), "preprocess_input", None)
    return method is not None and method.__module__ != "torchrec.distributed.types"


class _Written:
    """Weights in place of those that features have, or are to get."""

    def __init__(self) -> None:
        self._features: dict[int, Any] = {}  # that have none, by identity
        self._memory: dict[int, torch.UntypedStorage] = {}  # of others, by where it lies

    def copy(self, features: list[Any]) -> None:
        """These are about to be written to, as they are now."""
        for part in features:
            weights = part.weights_or_none()
            if weights is None:
                copied = self._features[id(part)] = copy.copy(self.now(part))
                if copied.weights_or_none() is not None:
                    copied._weights = copied.weights().clone()
            else:
                memory = weights.untyped_storage()
                self._memory[memory.data_ptr()] = self._memory.get(memory.data_ptr(), memory).clone()

    def now(self, part: Any) -> Any:
        if id(part) in self._features:
            return self._features[id(part)]
        weights: torch.Tensor | None = getattr(part, "weights_or_none", lambda: None)()
        memory = None if weights is None else self._memory.get(weights.untyped_storage().data_ptr())
        if weights is None or memory is None:
            return part
        copied = copy.copy(part)
        copied._weights = weights.new_empty(0).set_(memory, weights.storage_offset(), weights.size(), weights.stride())
        return copied
