"""Megatron's timers around what is timed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from farandole.megatron._config import StepConfig


@contextlib.contextmanager
def timed(config: StepConfig, name: str, log_level: int, **start: Any) -> Iterator[None]:
    """Stops the timer also where something is raised: one that runs cannot be started."""
    if config.timers is None:
        yield
        return
    config.timers(name, log_level=log_level).start(**start)
    try:
        yield
    finally:
        config.timers(name).stop()
