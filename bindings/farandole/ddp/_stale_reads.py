"""Whether a forward has read parameters before they had come: its graph tells, and gradients where that hides it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import torch
from torch.autograd.function import BackwardCFunction

# The number of the thread's next operation that is differentiated: they come in the order in which these ran.
_next_operation = torch._C._autograd._get_sequence_nr


class Waits:
    """Since which operation a forward may read the parameters of which bucket groups. Threads: the forward's."""

    def __init__(self) -> None:
        self.began = _next_operation()
        self._thread = threading.get_ident()
        self._since: dict[int, int] = {}
        self._since_all: int | None = None

    def add(self, groups: Iterable[int]) -> None:
        now = _next_operation()
        for group in groups:
            self._since.setdefault(group, now)

    def add_all(self) -> None:
        """Those of other groups are over, too. Any thread; another one's operations have other numbers."""
        if self._since_all is None and threading.get_ident() == self._thread:
            self._since_all = _next_operation()

    def were_over(self, group: int, operation: int) -> bool:
        since = self._since.get(group, self._since_all)
        return since is not None and since <= operation


class GraphReads:
    """The parameters that a forward's outputs depend on, each with the first operation that reads it.

    Costs half a microsecond for each operation. What ran before ``began`` is another forward's, excepted views of
    parameters, which are read by what takes them.
    """

    def __init__(self, outputs: Iterable[torch.Tensor], began: int) -> None:
        self.first: dict[torch.Tensor, int] = {}
        self.functions: list[Any] = []  # Python's, which may have read more than they were given
        stack: list[Any] = [output.grad_fn for output in outputs if output.grad_fn is not None]
        seen = set(stack)
        while stack:
            node = stack.pop()
            operation = node._sequence_nr()
            if operation < began:
                continue
            if isinstance(node, BackwardCFunction):
                self.functions.append(node)
            for following, _ in node.next_functions:
                following = _viewed(following, began)
                if isinstance(following, torch._C._functions.AccumulateGrad):
                    first = self.first.setdefault(following.variable, operation)
                    self.first[following.variable] = min(first, operation)
                elif following is not None and following not in seen:
                    seen.add(following)
                    stack.append(following)


def _viewed(node: Any, began: int) -> Any:
    while (
        node is not None
        and not isinstance(node, torch._C._functions.AccumulateGrad)
        and node._sequence_nr() < began
        and len(node.next_functions) == 1
    ):
        node = node.next_functions[0][0]
    return node


class Suspects:
    """Parameters that a forward should not have read: ``refuse`` is called, in backward, with one that has a gradient
    of it. Such are all that come before something else has run that may read them, and those that come while one of
    the forward's own ``functions`` is differentiated, as reentrant checkpoints make them.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        functions: Iterable[Any],
        refuse: Callable[[torch.Tensor], NoReturn],
    ) -> None:
        self._refuse = refuse
        self._is_alone = True
        self._inside = 0
        self._handles = [parameter.register_hook(partial(self._see, parameter)) for parameter in parameters]
        for function in functions:
            function.register_prehook(self._enter)
            function.register_hook(self._leave)

    def others_read(self) -> None:
        """Something else runs that may read them, unless that is a part of the forward again, in its backward."""
        if torch._C._current_graph_task_id() == -1:
            self._is_alone = False

    def drop(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, *unused: Any) -> None:
        self._inside += 1

    def _leave(self, *unused: Any) -> None:
        self._inside -= 1

    def _see(self, parameter: torch.Tensor, grad: torch.Tensor) -> None:
        if self._is_alone or self._inside > 0:
            self._refuse(parameter)
