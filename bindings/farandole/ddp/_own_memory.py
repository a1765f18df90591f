"""Parameters that are to move to buffers, or to get copies: two in one memory would part without a word."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.parameter import is_lazy

Named = Iterable[tuple[str, torch.Tensor]]


def check_module(module: torch.nn.Module, trainable: Named) -> None:
    """Of one whose trainable parameters are to become views of buffers."""
    check_own_memory(trainable, (*module.named_parameters(), *module.named_buffers()), "use_distributed_optimizer=True")


def check_own_memory(moved: Named, others: Named, why: str) -> None:
    """A ValueError that names two tensors that share memory, one of which is moved. ``why``: what moves them."""
    moved = list(moved)
    moving = {id(tensor) for _, tensor in moved}
    named = [(name, tensor) for name, tensor in (*moved, *others) if _has_memory(tensor)]
    spans = sorted(((*_span(tensor), name, tensor) for name, tensor in named), key=lambda span: span[:2])
    open_: list[tuple[int, str, torch.Tensor]] = []  # what has begun before, with its end
    for begin, end, name, tensor in spans:
        open_ = [span for span in open_ if span[0] > begin]
        for _, before, other in open_:
            is_moved = id(tensor) in moving or id(other) in moving
            if tensor is not other and is_moved and _shares(tensor, other):
                raise ValueError(
                    f"parameter or buffer '{name}' shares memory with '{before}', and {why} gives each its own: expected "
                    "one parameter by both names where they are tied, else copies"
                )
        open_.append((end, name, tensor))


def _has_memory(tensor: torch.Tensor) -> bool:
    if is_lazy(tensor):  # a buffer that the first forward makes
        return False
    return tensor.layout == torch.strided and not tensor.is_meta and tensor.numel() > 0


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _shares(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Of two whose spans overlap: whether elements do. Columns of one matrix do not."""
    if one.device != other.device:
        return False
    if one.element_size() != other.element_size():
        return True
    places = []
    for tensor in (one, other):
        begin, end = _span(tensor)
        elements = torch.arange((end - begin) // tensor.element_size()).as_strided(tensor.shape, tensor.stride())
        places.append(elements.reshape(-1) * tensor.element_size() + begin)
    return bool(torch.isin(*places).any())
