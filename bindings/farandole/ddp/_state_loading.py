"""The way back of a distributed optimizer's state, by the names of its parameters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from farandole.ddp._optimizer_state import (
    HAS_STEPPED,
    MASTER,
    FlatPart,
    check_same,
    forget,
    initialize_lacking,
    is_parted,
    is_unused_in,
    values_of,
)
from farandole.ddp._runs import Piece, Run
from farandole.ddp._settings import kept_settings, restore_settings


def check_form(state_dict: Any) -> None:
    """Of what is loaded."""
    if not isinstance(state_dict, dict) or not {"state", "param_groups"} <= state_dict.keys():
        has = f"has {sorted(map(str, state_dict))}" if isinstance(state_dict, dict) else f"is {state_dict!r}"
        raise ValueError(f"state_dict {has}: expected 'state' and 'param_groups', as state_dict() makes it")


def has_stepped(state_dict: dict[str, Any]) -> bool:
    """Of the optimizer that it was saved of."""
    return all(group.get(HAS_STEPPED, True) for group in state_dict["param_groups"])


@contextlib.contextmanager
def undone_on_error(optimizer: torch.optim.Optimizer, runs: list[Run], has_state: bool) -> Iterator[None]:
    """What is made to be loaded into, by an optimizer that has no state of its own, and what take_settings() has set."""
    settings = kept_settings(optimizer.param_groups)
    try:
        yield
    except BaseException:
        restore_settings(optimizer.param_groups, settings)
        if not has_state:
            forget(optimizer, runs)
        raise


def take_settings(optimizer: torch.optim.Optimizer, names: list[list[str]], state_dict: dict[str, Any]) -> None:
    """Learning rates and the like: first, since what state there is may depend on them."""
    groups = state_dict["param_groups"]
    if len(groups) != len(optimizer.param_groups):
        raise ValueError(f"state_dict has {len(groups)} param groups: expected {len(optimizer.param_groups)}")
    copied: dict[int, Any] = {}  # what groups share, a rate that is a tensor say, they share afterwards, too
    for index, (group, loaded, group_names) in enumerate(zip(optimizer.param_groups, groups, names, strict=True)):
        if set(loaded["params"]) != set(group_names):
            raise ValueError(
                f"state_dict's param group {index} has the parameters {list(loaded['params'])}: expected {group_names}"
            )
        settings = {key: value for key, value in loaded.items() if key not in ("params", HAS_STEPPED)}
        group.update(copy.deepcopy(settings, copied))  # schedulers change tensors in place
    # As torch's load_state_dict: what a class settles by itself, as AdamW its kind of decay, comes from no other.
    optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})


def match(optimizer: torch.optim.Optimizer, runs: list[Run], state_dict: dict[str, Any]) -> list[Callable[[], Any]]:
    """The way back, in place: what has to be done, once all of it was found to be there."""
    made = initialize_lacking(optimizer, runs, state_dict)
    try:
        return _match(optimizer, runs, state_dict)
    except Exception:
        for run in made:
            optimizer.state.pop(run.tensor, None)
        raise


def _match(optimizer: torch.optim.Optimizer, runs: list[Run], state_dict: dict[str, Any]) -> list[Callable[[], Any]]:
    todo: list[Callable[[], Any]] = []
    for run in runs:
        is_unused = has_stepped(state_dict) and is_unused_in(state_dict, run)
        if is_unused:
            todo.append(partial(optimizer.state.pop, run.tensor, None))
        values = values_of(optimizer, run)
        if not is_unused:
            _check_known(state_dict["state"], run, values)
        for key, value in values.items():
            if is_unused and key != MASTER:
                continue
            found = [_value_in(state_dict["state"], piece, key) for piece in run.pieces]
            if is_parted(key, value, run):
                for piece, source in zip(run.pieces, found, strict=True):
                    todo.append(partial(piece.put, value, _part_in(source, piece, key)))
                continue
            for piece, other in zip(run.pieces, found, strict=True):
                if isinstance(other, (int, float, torch.Tensor)):
                    check_same("state_dict has", run, piece, key, found[0], other)
            if not isinstance(value, torch.Tensor):
                is_number = isinstance(value, (int, float)) and isinstance(found[0], torch.Tensor)
                read = type(value)(found[0].item()) if is_number else copy.deepcopy(found[0])
                todo.append(partial(optimizer.state[run.tensor].__setitem__, key, read))
            elif found[0].shape != value.shape:
                raise ValueError(
                    f"state_dict has {key!r} of parameter '{run.pieces[0].name}' in the shape {tuple(found[0].shape)}: "
                    f"expected {tuple(value.shape)}"
                )
            else:
                todo.append(partial(value.copy_, found[0]))
    return todo


def _check_known(state: dict[str, dict[str, Any]], run: Run, values: dict[str, Any]) -> None:
    for piece in run.pieces:
        unknown = state.get(piece.name, {}).keys() - values.keys() - {MASTER, HAS_STEPPED}
        if unknown:
            raise ValueError(
                f"state_dict has {min(unknown)!r} of parameter '{piece.name}', which this optimizer does not make: expected "
                "the state of the same kind of optimizer, with the same settings"
            )


_REMEDY = (
    "Was it saved by another number of ranks, or with another bucket size? Take full_state_dict(), or "
    "torch.distributed.checkpoint"
)


def _value_in(state: dict[str, Any], piece: Piece, key: str) -> Any:
    if piece.name not in state:
        raise ValueError(
            f"state_dict has nothing of parameter '{piece.name}', of which this rank owns the elements "
            f"[{piece.begin}, {piece.begin + piece.numel}). {_REMEDY}"
        )
    if key not in state[piece.name]:
        raise ValueError(
            f"state_dict has no {key!r} of parameter '{piece.name}': expected the state of the same kind of optimizer"
        )
    return state[piece.name][key]


def _part_in(source: Any, piece: Piece, key: str) -> torch.Tensor:
    if isinstance(source, FlatPart):
        begin, tensor, whole = source.begin, source.tensor, source.whole
    else:
        begin, tensor, whole = 0, source.reshape(-1), source.numel()
    if whole != piece.parameter.numel():
        raise ValueError(
            f"state_dict has {key!r} of parameter '{piece.name}' with {whole} elements: expected "
            f"{piece.parameter.numel()}, as the parameter has"
        )
    first = piece.begin - begin
    if first < 0 or first + piece.numel > tensor.numel():
        raise ValueError(
            f"state_dict has the elements [{begin}, {begin + tensor.numel()}) of {key!r} of parameter '{piece.name}': "
            f"expected [{piece.begin}, {piece.begin + piece.numel}), which this rank owns. {_REMEDY}"
        )
    return tensor[first : first + piece.numel]
