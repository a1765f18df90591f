"""What torch keeps by thread, for stages that another thread runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

from farandole.sparse._contexts import NOTHING


class Caller:
    """The thread that made it: default device, gradient and inference mode, which an iterator or a batch may rely on."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._device = torch.get_default_device()

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """As the caller's thread, on any other."""
        return NOTHING if threading.get_ident() == self._thread else self._entered()

    @contextlib.contextmanager
    def _entered(self) -> Iterator[None]:
        # The mode of a default device looks at each call, so that of the CPU is left out.
        has_device = self._device.type != "cpu"
        with (
            torch.inference_mode(self._inference),
            torch.set_grad_enabled(self._grad),
            torch.device(self._device) if has_device else NOTHING,
        ):
            yield
