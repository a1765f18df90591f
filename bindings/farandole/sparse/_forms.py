"""What features are made of besides their sizes, in an integer that ranks tell each other: they have to agree on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

# All tensors that features may have, in the order of their splits (KeyedJaggedTensor.dist_labels).
TENSORS = ("lengths", "values", "strides", "weights")

_TYPES = (
    torch.int64,
    torch.int32,
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
_KINDS = len(_TYPES) + 2  # none first, others last


def form_of(types: Mapping[str, torch.dtype]) -> int:
    """Of features with tensors of these names and types."""
    form = 0
    for name in reversed(TENSORS):
        form *= _KINDS
        if name in types:
            form += 1 + (_TYPES.index(types[name]) if types[name] in _TYPES else len(_TYPES))
    return form


def refuse_other_forms(forms: Mapping[str, Sequence[Sequence[int]]], ranks: Sequence[int]) -> None:
    """
    Args:
        forms: of the features of each module by name, on each of the ranks. All ranks have the same.

    Raises:
        ValueError: those of some ranks are others.
    """
    for name, of_ranks in forms.items():
        for rank, found in zip(ranks, of_ranks, strict=True):
            for one, other in zip(of_ranks[0], found, strict=True):
                if one != other:
                    raise ValueError(
                        f"features for {name} have {_described(one)} on rank {ranks[0]}, {_described(other)} on rank "
                        f"{rank}: expected the same on all ranks"
                    )


def _described(form: int) -> str:
    parts = []
    for name in TENSORS:
        form, kind = divmod(form, _KINDS)
        if kind > 0:
            type_ = str(_TYPES[kind - 1]).removeprefix("torch.") if kind <= len(_TYPES) else "other"
            parts.append("batch sizes of their own" if name == "strides" else f"{type_} {name}")
    return ", ".join(parts)
