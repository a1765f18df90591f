"""Features that a sharded module of torchrec's cannot take, by the names of the module and its argument."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import nn

from farandole.sparse._sharded import is_torchrec

Call = tuple[tuple[Any, ...], dict[str, Any]]


def refuse_wrong_inputs(modules: Mapping[str, nn.Module], calls: Mapping[str, Call]) -> None:
    """Looks at what torchrec would fail at with an error that names neither; not at what may be inside of features.

    Raises:
        TypeError: something else than features.
        ValueError: features without a key that the tables of a module have.
    """
    for name, (args, kwargs) in calls.items():
        module = modules[name]
        if not is_torchrec(module):
            continue
        for argument, value in _by_name(module, args, kwargs):
            given = f"{name} is given {{}} for its argument {argument}"
            has_keys = hasattr(value, "keys") and hasattr(value, "values")  # as a TensorDict, which is taken, too
            if not has_keys or isinstance(value, dict):
                what = "None" if value is None else f"a {type(value).__name__}"
                raise TypeError(f"{given.format(what)}: expected a KeyedJaggedTensor")
            keys = list(value.keys())
            missing = sorted({*_keys_of(module)}.difference(keys))
            if missing:
                what = f"features with the keys {keys}"
                raise ValueError(f"{given.format(what)}: expected {', '.join(map(repr, missing))} among them")


def _by_name(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    _, *names = inspect.signature(module.input_dist).parameters  # behind the context
    return [*zip(names, args, strict=False), *kwargs.items()]


def _keys_of(module: nn.Module) -> Iterator[str]:
    """Those that its first input_dist looks for."""
    for child in module.modules():
        shardings = (*getattr(child, "_embedding_shardings", ()), *_values(child, "_sharding_type_to_sharding"))
        for sharding in shardings:
            if hasattr(sharding, "feature_names"):
                yield from sharding.feature_names()


def _values(module: nn.Module, name: str) -> tuple[Any, ...]:
    found = getattr(module, name, None)
    return tuple(found.values()) if isinstance(found, Mapping) else ()


class KeyOrders:
    """The order in which the features of each of torchrec's modules have their keys, which it settles with its first
    batch: of others it would take one feature for another."""

    def __init__(self) -> None:
        self._first: dict[str, list[list[str]]] = {}

    def refuse_others(self, names: Iterable[str], calls: Mapping[str, Call]) -> None:
        """
        Args:
            names: of torchrec's modules.

        Raises:
            ValueError: features with keys in another order than in the first batch.
        """
        for name in names:
            args, kwargs = calls[name]
            now = [
                part.keys()
                for part in (*args, *kwargs.values())
                if hasattr(part, "weights_or_none") and hasattr(part, "keys")
            ]
            first = self._first.setdefault(name, now)
            if now == first:
                continue
            for keys, expected in zip(now, first, strict=False):
                if keys is not expected and keys[: len(expected)] != expected:
                    raise ValueError(
                        f"{name} is given features with the keys {keys}: expected {expected} in this order, as in the first "
                        "batch, since torchrec's modules take features by their places"
                    )
