"""Whether a forward has read parameters before they had come: its graph tells, and gradients where that hides it."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

# The number of the thread's next operation that is differentiated: they come in the order in which these ran.
_next_operation = torch._C._autograd._get_sequence_nr
_LEAF = 2**64 - 1  # that of what accumulates a parameter's gradient


class Waits:
    """Since which operation a forward may read the parameters of which bucket groups. Threads: the forward's."""

    def __init__(self) -> None:
        self.began = _next_operation()
        self._thread = threading.get_ident()
        self._since: dict[int, int] = {}
        self._since_all: int | None = None
        self.are_of_one_thread = True  # else operations' numbers do not compare

    def add(self, groups: Iterable[int]) -> None:
        now = _next_operation()
        if threading.get_ident() != self._thread:
            self.are_of_one_thread = False
        for group in groups:
            self._since.setdefault(group, now)

    def add_all(self) -> None:
        """Those of other groups are over, too. Any thread; another one's operations have other numbers."""
        if self._since_all is None and threading.get_ident() == self._thread:
            self._since_all = _next_operation()

    def by_group(self, count: int) -> list[int]:
        """The operation since which they were over; -1: they were not."""
        others = -1 if self._since_all is None else self._since_all
        return [self._since.get(group, others) for group in range(count)]

    def were_over(self, group: int, operation: int) -> bool:
        since = self._since.get(group, self._since_all)
        return since is not None and since <= operation


class GraphReads:
    """The parameters that a forward's outputs depend on, each with the first operation that reads it.

    Costs a microsecond for each operation. What ran before ``began`` is another forward's, excepted views of
    parameters, which are read by what takes them.
    """

    def __init__(self, outputs: Iterable[torch.Tensor], began: int) -> None:
        self.first: dict[torch.Tensor, int] = {}
        self.functions: list[Any] = []  # Python's, which may have read more than they were given
        seen = {output.grad_fn for output in outputs if output.grad_fn is not None}
        stack = [(node, node._sequence_nr()) for node in seen if node._sequence_nr() >= began]
        while stack:
            node, operation = stack.pop()
            if isinstance(node, BackwardCFunction):
                self.functions.append(node)
            for following, _ in node.next_functions:
                if following is None or following in seen:
                    continue
                number = following._sequence_nr()
                if number < began:
                    following, number = _viewed(following, began)
                if number == _LEAF:
                    parameter = following.variable
                    self.first[parameter] = min(operation, self.first.get(parameter, operation))
                elif number >= began:
                    seen.add(following)
                    stack.append((following, number))


def _viewed(node: Any, began: int) -> tuple[Any, int]:
    number = node._sequence_nr()
    while number < began and len(node.next_functions) == 1 and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
        number = node._sequence_nr()
    return node, number


def _weak(method: Callable[..., None]) -> Callable[..., None]:
    """For hooks of tensors and graphs, whose cycles are never collected."""
    of = weakref.WeakMethod(method)

    def call(*args: Any) -> None:
        bound = of()
        if bound is not None:
            bound(*args)

    return call


class Suspects:
    """Parameters that a forward should not have read: ``refuse`` is called, in backward, with one that has a gradient
    of it. Such are all that come before something else has run that may read them, and those that come while one of
    the forward's own ``functions`` is differentiated, as reentrant checkpoints make them.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        functions: Iterable[Any],
        refuse: Callable[[torch.Tensor], None],
    ) -> None:
        self._refuse = refuse
        self._is_alone = True
        self._inside = 0
        see = _weak(self._see)
        self._handles = [parameter.register_hook(partial(see, parameter)) for parameter in parameters]
        for function in functions:
            function.register_prehook(_weak(self._enter))
            function.register_hook(_weak(self._leave))

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
