"""Parameters that other ranks have updated come back, while the next forward runs where that is asked for."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from farandole import _C
from farandole.ddp._compiled import Unwatched, is_compiled_in_place
from farandole.ddp._copying import HookOfOne
from farandole.ddp._outputs import tensors_in
from farandole.ddp._reads import ReadRecorder
from farandole.ddp._stale_reads import GraphReads, Suspects, Waits

if TYPE_CHECKING:
    from farandole.ddp._wrapper import DistributedDataParallel


class ParamSync:
    """Which modules wait for which buckets of parameters.

    Gathers are started by the optimizer, all at once, in the order of registration. A forward pre-hook of each module
    waits for the buckets that hold its parameters. Not every parameter is read inside the forward of the module that
    holds it (nn.MultiheadAttention reads those of its out_proj, whose forward is never called; Megatron-core's hooks
    leave such weights stale): so the first forward that is differentiated waits for all, and sees which modules are
    called and which parameters each one's own code reads (ReadRecorder). What modules hold that are not called is
    waited for by the innermost module around them that is. A later forward may read others, and too early: its graph is
    looked through, and the forward raises an error that names one that was. What the graph does not show where other
    modules are called, or in another order, raises it in backward, by a gradient of it (Suspects).

    Threads: the one that runs forwards.
    """

    def __init__(self, model: DistributedDataParallel, reducer: _C.GradReducer, overlaps: bool) -> None:
        self._gather = _C.ParamGather(reducer)
        self._group = model.process_group
        self._root: torch.nn.Module = model.module
        self.overlaps = overlaps and _can_have_hooks(self._root)
        groups = self._gather.bucket_group_of()
        names = [name for name, _ in reducer.main_grads()]
        self._name_of = {parameter: name for name, parameter in model._trainable.items()}
        self._group_of = {parameter: groups[names.index(name)] for parameter, name in self._name_of.items()}
        self._reads = _C.GraphReads(list(self._group_of), list(self._group_of.values()))
        self._num_groups = max(groups, default=-1) + 1
        self._awaited: dict[torch.nn.Module, list[int]] | None = None  # by module that the first forward called
        self._waiters: dict[torch.Tensor, set[torch.nn.Module]] = {}  # those that wait for each parameter itself
        self._calls: list[torch.nn.Module] = []
        self._first_calls: list[torch.nn.Module] = []
        self._depth = 0  # of forwards of the model inside each other
        self._in_forward = False
        self._handled: BaseException | None = None  # where the forward is called inside an except clause
        self._waits: Waits | None = None  # of a forward that had to wait
        self._recorder: ReadRecorder | None = None  # while the first forward runs
        self._handles: list[Any] = []
        self._hooked: dict[torch.nn.Module, Any] = {}  # handles of those that wait
        self._recorder_handles: list[Any] = []
        self._suspects: Suspects | None = None
        self._warned = False
        self._has_optimizer = False  # which starts the gathers by itself
        self._rounds = reducer.rounds
        self.updated_after = -1  # rounds: the optimizer has started its gathers since
        # All have started theirs, so that one rank may do this alone.
        self._state_handles: list[Any] = []
        for module in {self._root, *filter(_can_have_hooks, self._root.modules())}:  # whose state may be wanted alone
            saves, loads = module.register_state_dict_pre_hook, module.register_load_state_dict_pre_hook
            self._state_handles.append(saves(HookOfOne(self._before_state_dict)))
            self._state_handles.append(loads(HookOfOne(self._before_load_state_dict)))
        if self.overlaps:
            self.enable()

    def updated(self) -> None:
        """The optimizer has stepped: what other ranks own is old. Collective."""
        self.begin_update()
        self._run(self._gather.start)
        self.end_update()

    def begin_update(self) -> None:
        """The optimizer steps now: what other ranks own becomes old. ``updated_through`` and ``end_update`` follow."""
        self._has_optimizer = True
        self._mark_stale()

    def updated_through(self, bucket_group: int) -> None:
        """Down to this one all groups are stepped: their gathers start, while the others are."""
        self._run(self._gather.start_through, bucket_group)

    def end_update(self) -> None:
        """Waits for the gathers, unless forwards do."""
        self.updated_after = self._rounds()
        if not self._handles:
            self._run(self._gather.finish_all)

    def _run(self, step: Callable[..., Any], *args: Any) -> Any:
        """One of the gathers' own; its error says why the group was abandoned, if it was."""
        try:
            return step(*args)
        except RuntimeError as error:
            why = _C.abandonment_of(self._group)
            if not why:
                raise
            raise RuntimeError(f"farandole.ddp: parameters cannot be gathered any more: {why}") from error

    def bucket_groups(self) -> dict[torch.Tensor, int]:
        """Which one each trainable parameter comes with; the last one comes first."""
        return self._group_of

    def start(self, *, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Megatron-core's start_param_sync: asynchronous where it overlaps, unless ``force_sync``. Collective.

        A DistributedOptimizer starts the gathers in its step; after it this only waits, unless ``force_dispatch``.
        """
        if force_dispatch or not self._has_optimizer:
            self._gather_all()
        if force_sync or not self._handles:
            self.finish()

    def _gather_all(self) -> None:
        self._mark_stale()
        self._run(self._gather.start)
        self.updated_after = self._rounds()

    def _mark_stale(self) -> None:
        self._drop_suspects()
        # Whatever this rank has waited for so far: how many gathers there are must not depend on it.
        self._run(self._gather.finish_all)
        self._gather.mark_stale()

    def finish(self) -> None:
        """Waits until every parameter is what its owner has made of it."""
        self._run(self._gather.finish_all)
        if self._waits is not None:
            self._waits.add_all()

    def finish_unless_abandoned(self) -> None:
        """As finish(), for who goes on without a group that was given up."""
        try:
            self.finish()
        except RuntimeError:
            if not _C.abandonment_of(self._group):
                raise

    def leave(self) -> None:
        """Another wrapper has the parameters: nothing waits for this one's gathers any more."""
        self._drop_suspects()
        for handle in (*self._handles, *self._state_handles):
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        self._state_handles.clear()

    def record(self, timeline: _C.GradTimeline | None) -> None:
        """Gathers that start from now on are recorded there."""
        self._gather.record(timeline)

    def enable(self) -> None:
        """Modules wait for their parameters."""
        if self._handles:
            raise RuntimeError("enable_forward_pre_hook(): the hooks are enabled already")
        for module in _called_modules(self._root):
            # Before hooks that read the module's parameters, as weight_norm's does.
            hook = HookOfOne(self._before_module)
            self._hooked[module] = module.register_forward_pre_hook(hook, prepend=True)
        self._handles += self._hooked.values()
        self._handles.append(self._root.register_forward_hook(HookOfOne(self._after_root), always_call=True))

    def _unhook_compiled(self) -> None:
        """Hooks of modules that were compiled in place since would be compiled, too: what is around those waits, which
        the next forward learns."""
        inside = (module for module in self._hooked if module is not self._root or len(self._hooked) > 1)
        if any(is_compiled_in_place(module) for module in inside):
            for module in self._hooked.keys() - set(_called_modules(self._root)):
                self._hooked.pop(module).remove()
            self._awaited = None

    def disable(self, param_sync: bool) -> None:
        """Modules wait no more; with ``param_sync`` this waits for all."""
        if not self._handles:
            raise RuntimeError("disable_forward_pre_hook(): the hooks are not enabled")
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        self._others_read()  # forwards, which no hook will tell of
        if param_sync:
            self._run(self._gather.finish_all)

    def _before_state_dict(self, *unused: Any) -> None:
        self.finish()

    def _before_load_state_dict(self, *unused: Any) -> None:  # what would not come is loaded
        self.finish_unless_abandoned()

    def before_forward(self, may_be_compiled: bool) -> None:
        """Where no hook waits, this does. Nor does one that is compiled away: torch.compile takes code that it has made of
        another model, without hooks, for that of this one."""
        if self._depth > 0:  # what is no Exception, as KeyboardInterrupt, passes the hooks by
            self._break_off()
        if self._handles:
            self._unhook_compiled()
        waits = not self._handles or may_be_compiled or is_compiled_in_place(self._root)
        if waits and not self._gather.is_current:
            self._run(self._gather.finish_all)

    def _break_off(self) -> None:
        self._depth = 0
        self._in_forward = False
        self._waits = self._handled = None
        self._stop_recording()
        self._run(self._gather.finish_all)

    def _before_module(self, module: torch.nn.Module, args: Any) -> None:
        if module is self._root:
            self._depth += 1
            if self._depth == 1:
                self._begin_forward()
        elif not self._in_forward:
            # A part of the model by itself: who reads what in it was not learned.
            if not self._gather.is_current:
                self._run(self._gather.finish_all)
            self._others_read()
            return
        self._calls.append(module)
        if self._recorder is not None:
            self._recorder.begin(module, _is_opaque(module))
        if self._awaited is None or self._waits is None:
            return
        if self._gather.is_current:
            self._waits.add_all()
            return
        if module not in self._awaited:  # the first forward did not call it
            self._awaited[module] = self._groups_of(module.parameters())
            for parameter in module.parameters():
                if parameter in self._group_of:
                    self._waiters[parameter].add(module)
        is_out_of_order = self._run(self._gather.finish, self._awaited[module])
        self._waits.add(self._awaited[module])
        if is_out_of_order and not self._warned:
            self._warned = True
            warnings.warn(
                f"the forward of {type(self._root).__name__} needs parameters in another order than they were "
                "registered in: values are right, but less of their all-gather is hidden",
                stacklevel=2,
            )

    def _begin_forward(self) -> None:
        self._others_read()
        self._calls = []
        self._in_forward = not self._gather.is_current
        if self._in_forward:
            self._handled = sys.exc_info()[1]
        # Without gradients no backward could tell that a parameter was read too early.
        if self._in_forward and (self._awaited is None or not torch.is_grad_enabled()):
            self._run(self._gather.finish_all)
        if self._in_forward and self._awaited is None and torch.is_grad_enabled() and not _is_opaque(self._root):
            self._record()
        if not self._gather.is_current:
            self._waits = Waits()

    def _record(self) -> None:
        recorder = self._recorder = ReadRecorder(self._group_of)
        for module in _called_modules(self._root):
            if module is not self._root:
                hook = module.register_forward_hook(lambda module, args, output: recorder.end(module), always_call=True)
                self._recorder_handles.append(hook)
        self._recorder_handles += [
            Unwatched(one, recorder) for one in self._root.modules() if is_compiled_in_place(one)
        ]
        recorder.__enter__()

    def _stop_recording(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()
        for handle in self._recorder_handles:
            handle.remove()
        self._recorder_handles.clear()

    def _after_root(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)  # 0 where a hook before ours has raised
        if self._depth > 0 or not self._in_forward:
            return
        self._in_forward = False
        has_raised = sys.exc_info()[1] is not self._handled
        read = {} if self._recorder is None else self._recorder.read
        waits, self._waits, self._handled = self._waits, None, None
        self._stop_recording()
        is_whole = torch.is_grad_enabled() and not has_raised
        if self._awaited is None:
            # Half a forward, or one for evaluation, may leave out what the next one reads.
            if is_whole:
                self._awaited = self._learn(read)
            return
        self._run(self._gather.finish_all)
        if waits is None or not is_whole:
            return
        if self._calls != self._first_calls:
            self._check_reads(GraphReads(tensors_in(output), waits.began), waits)
        elif waits.are_of_one_thread:  # calls that are alike may read something else
            first = self._reads.too_early(tensors_in(output), waits.began, waits.by_group(self._num_groups))
            if first >= 0:
                self._refuse("was", list(self._group_of)[first])

    def _check_reads(self, reads: GraphReads, waits: Waits) -> None:
        for parameter, operation in reads.first.items():
            group = self._group_of.get(parameter)
            if group is not None and not waits.were_over(group, operation):
                self._refuse("was", parameter)
        called = set(self._calls)
        suspects = [
            parameter
            for parameter, waiters in self._waiters.items()
            if waiters.isdisjoint(called) and parameter.requires_grad and parameter not in reads.first
        ]
        if suspects:
            self._suspects = Suspects(suspects, reads.functions, partial(self._refuse, "may have been"))

    def _others_read(self) -> None:
        if self._suspects is not None:
            self._suspects.others_read()

    def _drop_suspects(self) -> None:
        if self._suspects is not None:
            self._suspects.drop()
            self._suspects = None

    def _learn(self, read: dict[torch.nn.Module, set[torch.Tensor]]) -> dict[torch.nn.Module, list[int]]:
        self._first_calls = self._calls
        needed = {module: set(read.get(module, ())) for module in self._calls}
        for module, caller in _with_callers(self._root, set(self._calls)):
            needed[caller].update(p for p in module.parameters(recurse=False) if p in self._group_of)
        self._waiters = {parameter: set() for parameter in self._group_of}
        for module, parameters in needed.items():
            for parameter in parameters:
                self._waiters[parameter].add(module)
        return {module: self._groups_of(parameters) for module, parameters in needed.items()}

    def _groups_of(self, parameters: Iterable[torch.Tensor]) -> list[int]:
        """Those that come first, first."""
        return sorted({self._group_of[p] for p in parameters if p in self._group_of}, reverse=True)

    def _refuse(self, how: str, parameter: torch.Tensor) -> NoReturn:
        waiters = self._waiters[parameter]
        names = [f"'{name}'" for name, module in self._root.named_modules() if module in waiters]
        self._awaited = None  # the next forward learns anew
        self._drop_suspects()
        raise RuntimeError(
            f"parameter '{self._name_of[parameter]}' {how} read before other ranks' updates of it had come: by a "
            f"forward that had not called {' or '.join(names)} by then, as the first forward did. "
            "Where the forward's calls change, pass overlap_param_gather=False"
        )


def _is_opaque(module: torch.nn.Module) -> bool:
    """Whether hooks on what is inside it would be compiled away, or cut its graph."""
    return isinstance(module, torch._dynamo.OptimizedModule) or is_compiled_in_place(module)


def _can_have_hooks(module: torch.nn.Module) -> bool:
    return not isinstance(module, torch.jit.ScriptModule)


def _called_modules(root: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """Modules that can have hooks, each once."""
    seen = {root}
    stack = [root]
    while stack:
        module = stack.pop()
        yield module
        if _is_opaque(module):
            continue
        for child in module.children():
            if child not in seen and _can_have_hooks(child) and not is_compiled_in_place(child):
                seen.add(child)
                stack.append(child)


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
