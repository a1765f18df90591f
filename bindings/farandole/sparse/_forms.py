"""What features are made of besides their sizes, in an integer that ranks tell each other: they have to agree on it."""

from __future__ import annotations

import functools
from collections.abc import Sequence

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


@functools.lru_cache(maxsize=64)
def form_of(*types: tuple[str, torch.dtype]) -> int:
    """Of features with tensors of these names and types."""
    by_name, form = dict(types), 0
    for name in reversed(TENSORS):
        form *= _KINDS
        if name in by_name:
            form += 1 + (_TYPES.index(by_name[name]) if by_name[name] in _TYPES else len(_TYPES))
    return form


def other_forms(module: str, forms: Sequence[int], ranks: Sequence[int]) -> ValueError:
    """Which of these features of a module, on each of the ranks, is not as on the first one; the same text on all ranks."""
    rank, other = next((rank, form) for rank, form in zip(ranks, forms, strict=True) if form != forms[0])
    return ValueError(
        f"features for {module} have {_described(forms[0])} on rank {ranks[0]}, {_described(other)} on rank {rank}: "
        "expected the same on all ranks"
    )


def _described(form: int) -> str:
    parts = []
    for name in TENSORS:
        form, kind = divmod(form, _KINDS)
        if kind > 0:
            type_ = str(_TYPES[kind - 1]).removeprefix("torch.") if kind <= len(_TYPES) else "other"
            parts.append("batch sizes of their own" if name == "strides" else f"{type_} {name}")
    return ", ".join(parts)
