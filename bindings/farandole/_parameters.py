"""Parameters of modules that may be wrapped."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn


def parameters_unread(module: nn.Module) -> Iterator[nn.Parameter]:
    """Without the wait of a data-parallel wrapper, whose ``parameters()`` are there to be read: for types and devices."""
    return (parameter for _, parameter in nn.Module.named_parameters(module))
