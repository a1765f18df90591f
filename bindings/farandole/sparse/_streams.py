"""The streams of a pipeline on an accelerator: copies, input_dists and prefetches beside the current one. On CPU there
are none.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from farandole.sparse._batches import record_stream
from farandole.sparse._contexts import NOTHING


class Streams:
    """
    Args:
        module: torch's of the device; tests give another one.

    Raises:
        ValueError: torch does not find the device here.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self._module = module
        if module is None and device.type != "cpu":
            self._module = _module_of(device)
        self._device = device
        if self._module is None:
            self.on = self.hand_over = self.catch_up = NOTHING  # type: ignore[assignment]
        self.copy, self.dist, self.prefetch = (
            None if self._module is None else self._module.Stream(device=device, priority=priority)
            for priority in (-1, -1, 0)
        )

    def current(self) -> torch.Stream | None:
        return None if self._module is None else self._module.current_stream(self._device)

    def on(self, stream: torch.Stream | None) -> contextlib.AbstractContextManager[Any]:
        """Work of any thread goes to this stream of the device."""
        return NOTHING if stream is None else self._on(stream)

    @contextlib.contextmanager
    def _on(self, stream: torch.Stream) -> Any:
        assert self._module is not None
        with self._module.device(self._device), self._module.stream(stream):
            yield

    def hand_over(self, source: torch.Stream | None, *values: Any) -> None:
        """The current stream waits for ``source`` and may use the values, which were made on it."""
        if source is None:
            return
        assert self._module is not None
        current = self._module.current_stream(self._device)
        current.wait_stream(source)
        for value in values:
            record_stream(value, current)

    def catch_up(self, stream: torch.Stream | None) -> None:
        """The stream waits for what the current one is to do by now, which may write what it reads."""
        if stream is not None:
            assert self._module is not None
            stream.wait_stream(self._module.current_stream(self._device))


def _module_of(device: torch.device) -> Any:
    module: Any = getattr(torch, device.type, None)
    count = module.device_count() if hasattr(module, "device_count") else 0
    if (device.index or 0) >= count:
        raise ValueError(f'device={str(device)!r}: expected "cpu", or what torch finds here: {count} of {device.type}')
    return module
