"""What torch and Python keep by thread, for stages that another thread runs."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from farandole.sparse._autocast import Autocast
from farandole.sparse._contexts import NOTHING

T = TypeVar("T")


class Caller:
    """The thread that made it: default device, gradient and inference mode, autocast and context variables, which an
    iterator, a batch or a module may rely on.
    """

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._device = torch.get_default_device()
        self._autocast = Autocast()
        self.variables = contextvars.copy_context()

    def is_here(self) -> bool:
        return threading.get_ident() == self._thread

    def run(self, call: Callable[..., T], *args: Any) -> T:
        """As on the caller's thread, on any other; with a copy of its context variables."""
        return call(*args) if self.is_here() else self.variables.copy().run(self._run, call, args)

    def run_in(self, variables: contextvars.Context, call: Callable[..., T], *args: Any) -> T:
        """With other context variables."""
        return variables.run(call, *args) if self.is_here() else variables.run(self._run, call, args)

    def _run(self, call: Callable[..., T], args: Any) -> T:
        # The mode of a default device looks at each call, so that of the CPU is left out.
        has_device = self._device.type != "cpu"
        with (
            torch.inference_mode(self._inference),
            torch.set_grad_enabled(self._grad),
            torch.device(self._device) if has_device else NOTHING,
            self._autocast.entered(),
        ):
            return call(*args)


class IteratorVariables:
    """The context variables of an iterator that any thread may run: the caller's, as they are at each of its batches.
    What it sets itself stays for its next batches, and the caller does not see it: a generator may set one, and reset it
    as it ends, on another thread.
    """

    def __init__(self) -> None:
        self._own = contextvars.Context()
        self._callers: dict[contextvars.ContextVar[Any], tuple[Any, contextvars.Token[Any]]] = {}

    def run(self, caller: Caller, call: Callable[..., T], *args: Any) -> T:
        self._follow(caller.variables)
        return caller.run_in(self._own, call, *args)

    def _follow(self, variables: contextvars.Context) -> None:
        for variable, value in variables.items():
            known = self._callers.get(variable)
            if known is None or known[0] is not value:
                token = self._own.run(variable.set, value)
                self._callers[variable] = value, token if known is None else known[1]
        if len(self._callers) > len(variables):
            for variable in self._callers.keys() - variables.keys():
                _, token = self._callers.pop(variable)
                self._own.run(variable.reset, token)  # as before the first
