"""Which parameters each module of a forward waits for, and whether one was read before it had come."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from farandole import _C
from farandole.ddp._compiled import Unwatched, called_modules, is_compiled_in_place, is_opaque
from farandole.ddp._outputs import tensors_in
from farandole.ddp._reads import ReadRecorder
from farandole.ddp._stale_reads import GraphReads, Suspects, Waits


class ForwardReads:
    """What the first forward with gradients shows: which modules it calls, and which parameters each one's own code
    reads (ReadRecorder). What modules hold that are not called is waited for by the innermost module around them that
    is. A later forward may read others, and too early: its graph is looked through, which names one that was. What the
    graph does not show where other modules are called, or in another order, a gradient of it tells in backward
    (Suspects). Either is an error of the round on all ranks, since others wait for this one's gradients.

    Threads: the one that runs forwards.
    """

    def __init__(
        self,
        root: torch.nn.Module,
        name_of: Mapping[torch.Tensor, str],
        group_of: Mapping[torch.Tensor, int],
        reducer: _C.GradReducer,
    ) -> None:
        """``group_of``: the bucket group that each parameter comes with."""
        self._root = root
        self._name_of = name_of
        self._group_of = group_of
        self._reducer = reducer
        self._graph_reads = _C.GraphReads(list(group_of), list(group_of.values()))
        self._num_groups = max(group_of.values(), default=-1) + 1
        self.awaited: dict[torch.nn.Module, list[int]] | None = None  # by module that the first forward called
        self._waiters: dict[torch.Tensor, set[torch.nn.Module]] = {}  # those that wait for each parameter itself
        self._calls: list[torch.nn.Module] = []
        self._first_calls: list[torch.nn.Module] = []
        self._recorder: ReadRecorder | None = None  # while the first forward runs
        self._recorder_handles: list[Any] = []
        self.suspects: Suspects | None = None

    def begin(self) -> None:
        """A forward of the model."""
        self.others_read()
        self._calls = []

    def record(self) -> None:
        """It is the first one."""
        recorder = self._recorder = ReadRecorder(self._group_of)
        for module in called_modules(self._root):
            if module is not self._root:
                hook = module.register_forward_hook(lambda module, args, output: recorder.end(module), always_call=True)
                self._recorder_handles.append(hook)
        self._recorder_handles += [
            Unwatched(one, recorder) for one in self._root.modules() if is_compiled_in_place(one)
        ]
        recorder.__enter__()

    def call(self, module: torch.nn.Module) -> None:
        """Its forward begins."""
        self._calls.append(module)
        if self._recorder is not None:
            self._recorder.begin(module, is_opaque(module))

    def groups_for(self, module: torch.nn.Module) -> list[int]:
        """What a module waits for, once forwards are known."""
        assert self.awaited is not None
        if module not in self.awaited:  # the first forward did not call it
            self.awaited[module] = self._groups_of(module.parameters())
            for parameter in module.parameters():
                if parameter in self._group_of:
                    self._waiters[parameter].add(module)
        return self.awaited[module]

    def stop(self) -> dict[torch.nn.Module, set[torch.Tensor]]:
        """The forward has ended, or was broken off: what was recorded in it."""
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()
        for handle in self._recorder_handles:
            handle.remove()
        self._recorder_handles.clear()
        return {} if recorder is None else recorder.read

    def learn(self, read: dict[torch.nn.Module, set[torch.Tensor]]) -> None:
        self._first_calls = self._calls
        needed = {module: set(read.get(module, ())) for module in self._calls}
        for module, caller in _with_callers(self._root, set(self._calls)):
            needed[caller].update(p for p in module.parameters(recurse=False) if p in self._group_of)
        self._waiters = {parameter: set() for parameter in self._group_of}
        for module, parameters in needed.items():
            for parameter in parameters:
                self._waiters[parameter].add(module)
        self.awaited = {module: self._groups_of(parameters) for module, parameters in needed.items()}

    def check(self, output: Any, waits: Waits) -> None:
        """Of a forward that has waited: raises on all ranks where it has read a parameter too early."""
        if self._calls != self._first_calls:
            self._check_graph(GraphReads(tensors_in(output), waits.began), waits)
        elif waits.are_of_one_thread:  # calls that are alike may read something else
            since = waits.by_group(self._num_groups)
            first = self._graph_reads.too_early(tensors_in(output), waits.began, since)
            if first >= 0:
                self._refuse("was", list(self._group_of)[first])

    def others_read(self) -> None:
        """Something else runs that may read parameters."""
        if self.suspects is not None:
            self.suspects.others_read()

    def drop_suspects(self) -> None:
        if self.suspects is not None:
            self.suspects.drop()
            self.suspects = None

    def _check_graph(self, reads: GraphReads, waits: Waits) -> None:
        for parameter, operation in reads.first.items():
            group = self._group_of.get(parameter)
            if group is not None and not waits.were_over(group, operation):
                return self._refuse("was", parameter)
        called = set(self._calls)
        suspects = [
            parameter
            for parameter, waiters in self._waiters.items()
            if waiters.isdisjoint(called) and parameter.requires_grad and parameter not in reads.first
        ]
        if suspects:
            self.suspects = Suspects(suspects, reads.functions, partial(self._refuse, "may have been"))

    def _groups_of(self, parameters: Iterable[torch.Tensor]) -> list[int]:
        """Those that come first, first."""
        return sorted({self._group_of[p] for p in parameters if p in self._group_of}, reverse=True)

    def _refuse(self, how: str, parameter: torch.Tensor) -> None:
        waiters = self._waiters[parameter]
        names = [f"'{name}'" for name, module in self._root.named_modules() if module in waiters]
        self.awaited = None  # the next forward learns anew
        self.drop_suspects()
        trouble = (
            f"parameter '{self._name_of[parameter]}' {how} read before other ranks' updates of it had come: by a "
            f"forward that had not called {' or '.join(names)} by then, as the first forward did. "
            "Where the forward's calls change, pass overlap_param_gather=False"
        )
        if torch._C._current_graph_task_id() == -1:
            self._reducer.fail_round(trouble)
        else:  # whose end raises it
            self._reducer.note_trouble(trouble)


def _with_callers(
    root: torch.nn.Module, called: set[torch.nn.Module]
) -> Iterator[tuple[torch.nn.Module, torch.nn.Module]]:
    """Every module with the innermost one around it, itself included, that was called; once for each way to it."""
    stack = [(root, root)]
    while stack:
        module, caller = stack.pop()
        caller = module if module in called else caller
        yield module, caller
        stack.extend((child, caller) for child in module.children())
