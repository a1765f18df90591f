"""What several classes ask of their arguments."""

from __future__ import annotations

from typing import Any

import torch


def device_of(device: Any) -> torch.device:
    """
    Raises:
        TypeError, ValueError: it names none.
    """
    try:
        return torch.device(device)
    except TypeError as error:
        raise TypeError(f"device={device!r}: expected a torch.device, or its name") from error
    except RuntimeError as error:
        raise ValueError(f"device={device!r}: expected a torch.device, or its name: {error}") from error


def refuse_no_bool(name: str, value: Any, besides: str = "") -> None:
    """
    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r}: expected a bool{besides}")
