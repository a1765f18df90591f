"""Parameters that other ranks have updated come back, while the next forward runs where that is asked for."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from farandole import _C
from farandole.ddp._copying import HookOfOne
from farandole.ddp._reads import ReadRecorder

if TYPE_CHECKING:
    from farandole.ddp._wrapper import DistributedDataParallel


class ParamSync:
    """Which modules wait for which buckets of parameters.

    Gathers are started by the optimizer, all at once, in the order of registration. A forward pre-hook of each module
    waits for the buckets that hold its parameters. Not every parameter is read inside the forward of the module that
    holds it (nn.MultiheadAttention reads those of its out_proj, whose forward is never called; Megatron-core's hooks
    leave such weights stale): so the first forward that is differentiated waits for all, and sees which modules are
    called and which parameters each one's own code reads (ReadRecorder). What modules hold that are not called is
    waited for by the innermost module around them that is. Should a later forward leave out a module that the first one
    called, its parameters may have been read too early: if one of them then gets a gradient, backward raises an error
    that names it.

    Threads: the one that runs forwards.
    """

    def __init__(self, model: DistributedDataParallel, reducer: _C.GradReducer, overlaps: bool) -> None:
        self._gather = _C.ParamGather(reducer)
        self._root: torch.nn.Module = model.module
        self.overlaps = overlaps and _can_have_hooks(self._root)
        groups = self._gather.bucket_group_of()
        names = [name for name, _ in reducer.main_grads()]
        self._name_of = {parameter: name for name, parameter in model._trainable.items()}
        self._group_of = {parameter: groups[names.index(name)] for parameter, name in self._name_of.items()}
        self._awaited: dict[torch.nn.Module, list[int]] | None = None  # by module that the first forward called
        self._called: set[torch.nn.Module] = set()
        self._in_forward = False
        self._recorder: ReadRecorder | None = None  # while the first forward runs
        self._handles: list[Any] = []
        self._recorder_handles: list[Any] = []
        self._suspects: list[Any] = []
        self._warned = False
        self._has_optimizer = False  # which starts the gathers by itself
        # All have started theirs, so that one rank may do this alone.
        self._root.register_state_dict_pre_hook(HookOfOne(self._before_state_dict))
        self._root.register_load_state_dict_pre_hook(HookOfOne(self._before_state_dict))
        if self.overlaps:
            self.enable()

    def updated(self) -> None:
        """The optimizer has stepped: what other ranks own is old. Collective."""
        self.begin_update()
        self._gather.start()
        self.end_update()

    def begin_update(self) -> None:
        """The optimizer steps now: what other ranks own becomes old. ``updated_through`` and ``end_update`` follow."""
        self._has_optimizer = True
        self._gather.finish_all()
        self._gather.mark_stale()

    def updated_through(self, bucket_group: int) -> None:
        """Down to this one all groups are stepped: their gathers start, while the others are."""
        self._gather.start_through(bucket_group)

    def end_update(self) -> None:
        """Waits for the gathers, unless forwards do."""
        if not self._handles:
            self._gather.finish_all()

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
            self._gather.finish_all()

    def _gather_all(self) -> None:
        # Whatever this rank has waited for so far: how many gathers there are must not depend on it.
        self._gather.finish_all()
        self._gather.mark_stale()
        self._gather.start()

    def finish(self) -> None:
        """Waits until every parameter is what its owner has made of it."""
        self._gather.finish_all()

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
            self._handles.append(module.register_forward_pre_hook(hook, prepend=True))
        self._handles.append(self._root.register_forward_hook(HookOfOne(self._after_root), always_call=True))

    def disable(self, param_sync: bool) -> None:
        """Modules wait no more; with ``param_sync`` this waits for all."""
        if not self._handles:
            raise RuntimeError("disable_forward_pre_hook(): the hooks are not enabled")
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if param_sync:
            self._gather.finish_all()

    def _before_state_dict(self, *unused: Any) -> None:
        self.finish()

    def before_forward(self) -> None:
        """Where no hook waits, this does."""
        if not self._handles and not self._gather.is_current:
            self._gather.finish_all()

    def _before_module(self, module: torch.nn.Module, args: Any) -> None:
        if module is self._root:
            self._begin_forward()
        elif not self._in_forward:
            # A part of the model by itself: who reads what in it was not learned.
            if not self._gather.is_current:
                self._gather.finish_all()
            return
        self._called.add(module)
        if self._recorder is not None:
            self._recorder.begin(module, _is_opaque(module))
        if self._awaited is None or self._gather.is_current:
            return
        if module not in self._awaited:  # the first forward did not call it
            self._awaited[module] = self._groups_of(module.parameters())
        if self._gather.finish(self._awaited[module]) and not self._warned:
            self._warned = True
            warnings.warn(
                f"the forward of {type(self._root).__name__} needs parameters in another order than they were "
                "registered in: values are right, but less of their all-gather is hidden",
                stacklevel=2,
            )

    def _begin_forward(self) -> None:
        for handle in self._suspects:
            handle.remove()
        self._suspects.clear()
        self._called.clear()
        self._in_forward = not self._gather.is_current
        # Without gradients no backward could tell that a parameter was read too early.
        if self._in_forward and (self._awaited is None or not torch.is_grad_enabled()):
            self._gather.finish_all()
        if self._in_forward and self._awaited is None and torch.is_grad_enabled() and not _is_opaque(self._root):
            self._record()

    def _record(self) -> None:
        recorder = self._recorder = ReadRecorder(self._group_of)
        for module in _called_modules(self._root):
            if module is not self._root:
                hook = module.register_forward_hook(lambda module, args, output: recorder.end(module), always_call=True)
                self._recorder_handles.append(hook)
        recorder.__enter__()

    def _after_root(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if not self._in_forward:
            return
        self._in_forward = False
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.stop()
            for handle in self._recorder_handles:
                handle.remove()
            self._recorder_handles.clear()
        if self._awaited is None:
            # Half a forward, or one for evaluation, may leave out what the next one reads.
            if torch.is_grad_enabled() and sys.exc_info()[1] is None:
                self._awaited = self._learn({} if recorder is None else recorder.read)
            return
        self._gather.finish_all()
        for missing in self._awaited.keys() - self._called:
            for parameter in missing.parameters(recurse=False):
                if parameter in self._group_of and torch.is_grad_enabled():
                    self._suspects.append(parameter.register_hook(self._refusal_of(parameter)))

    def _learn(self, read: dict[torch.nn.Module, set[torch.Tensor]]) -> dict[torch.nn.Module, list[int]]:
        awaited = {module: set(self._groups_of(read.get(module, ()))) for module in self._called}
        for module, caller in _with_callers(self._root, self._called):
            awaited[caller].update(self._groups_of(module.parameters(recurse=False)))
        return {module: sorted(groups, reverse=True) for module, groups in awaited.items()}

    def _groups_of(self, parameters: Iterable[torch.Tensor]) -> list[int]:
        """Those that come first, first."""
        return sorted({self._group_of[p] for p in parameters if p in self._group_of}, reverse=True)

    def _refusal_of(self, parameter: torch.nn.Parameter) -> Any:
        def refuse(grad: torch.Tensor) -> None:
            self._awaited = None  # the next forward learns anew
            raise RuntimeError(
                f"parameter '{self._name_of[parameter]}' was read in a forward that did not call the module it belongs "
                "to, which the first forward did: it may have been read before other ranks' updates of it had come. "
                "Where the forward's calls change, pass overlap_param_gather=False"
            )

        return refuse


class SyncsParameters:
    """The part of the wrapper that says when parameters come, by Megatron-core's names."""

    _param_sync: ParamSync | None

    def start_param_sync(self, *unused: Any, force_sync: bool = False, force_dispatch: bool = False) -> None:
        """Brings the parameters that the optimizer has updated on other ranks: see ParamSync.start."""
        if self._param_sync is None:
            raise RuntimeError("start_param_sync(): nothing is sharded: expected use_distributed_optimizer=True")
        self._param_sync.start(force_sync=force_sync, force_dispatch=force_dispatch)

    def enable_forward_pre_hook(self) -> None:
        """Forwards wait for the parameters that they need, as after construction with overlap_param_gather."""
        self._overlapped_param_sync().enable()

    def disable_forward_pre_hook(self, param_sync: bool = True) -> None:
        """Forwards do not wait any more. Waits for all parameters now, unless ``param_sync`` is False."""
        self._overlapped_param_sync().disable(param_sync)

    def _overlapped_param_sync(self) -> ParamSync:
        if self._param_sync is None or not self._param_sync.overlaps:
            raise RuntimeError("forward pre-hooks: expected overlap_param_gather=True")
        return self._param_sync


def _is_opaque(module: torch.nn.Module) -> bool:
    """Whether hooks on what is inside it would be compiled away, or cut its graph."""
    return isinstance(module, torch._dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None


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
            if child not in seen and _can_have_hooks(child):
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
