"""Parameters that other ranks have updated come back, while the next forward runs where that is asked for."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from farandole import _C
from farandole.ddp._compiled import called_modules, can_have_hooks, is_compiled_in_place, is_opaque
from farandole.ddp._copying import HookOfOne
from farandole.ddp._forward_reads import ForwardReads
from farandole.ddp._stale_reads import Waits

if TYPE_CHECKING:
    from farandole.ddp._wrapper import DistributedDataParallel


class ParamSync:
    """Which modules wait for which buckets of parameters.

    Gathers are started by the optimizer, all at once, in the order of registration. A forward pre-hook of each module
    waits for the buckets that hold its parameters. Not every parameter is read inside the forward of the module that
    holds it (nn.MultiheadAttention reads those of its out_proj, whose forward is never called; Megatron-core's hooks
    leave such weights stale): so the first forward that is differentiated waits for all, and shows what each module
    needs (ForwardReads).

    Threads: the one that runs forwards.
    """

    def __init__(self, model: DistributedDataParallel, reducer: _C.GradReducer, overlaps: bool) -> None:
        self._gather = _C.ParamGather(reducer)
        self._group = model.process_group
        self._root: torch.nn.Module = model.module
        self.overlaps = overlaps and can_have_hooks(self._root)
        groups = self._gather.bucket_group_of()
        names = [name for name, _ in reducer.main_grads()]
        name_of: dict[torch.Tensor, str] = {parameter: name for name, parameter in model._trainable.items()}
        self._group_of = {parameter: groups[names.index(name)] for parameter, name in name_of.items()}
        self._reads = ForwardReads(self._root, name_of, self._group_of, reducer)
        self._depth = 0  # of forwards of the model inside each other
        self._in_forward = False
        self._handled: BaseException | None = None  # where the forward is called inside an except clause
        self._waits: Waits | None = None  # of a forward that had to wait
        self._handles: list[Any] = []
        self._hooked: dict[torch.nn.Module, Any] = {}  # handles of those that wait
        self._warned = False
        self._has_optimizer = False  # which starts the gathers by itself
        self._rounds = reducer.rounds
        self.updated_after = -1  # rounds: the optimizer has started its gathers since
        # All have started theirs, so that one rank may do this alone.
        self._state_handles: list[Any] = []
        for module in {self._root, *filter(can_have_hooks, self._root.modules())}:  # whose state may be wanted alone
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
        self._reads.drop_suspects()
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
        self._reads.drop_suspects()
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
        for module in called_modules(self._root):
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
            for module in self._hooked.keys() - set(called_modules(self._root)):
                self._hooked.pop(module).remove()
            self._reads.awaited = None

    def disable(self, param_sync: bool) -> None:
        """Modules wait no more; with ``param_sync`` this waits for all."""
        if not self._handles:
            raise RuntimeError("disable_forward_pre_hook(): the hooks are not enabled")
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked.clear()
        self._reads.others_read()  # forwards, which no hook will tell of
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
        self._reads.stop()
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
            self._reads.others_read()
            return
        self._reads.call(module)
        if self._reads.awaited is None or self._waits is None:
            return
        if self._gather.is_current:
            self._waits.add_all()
            return
        groups = self._reads.groups_for(module)
        is_out_of_order = self._run(self._gather.finish, groups)
        self._waits.add(groups)
        if is_out_of_order and not self._warned:
            self._warned = True
            warnings.warn(
                f"the forward of {type(self._root).__name__} needs parameters in another order than they were "
                "registered in: values are right, but less of their all-gather is hidden",
                stacklevel=2,
            )

    def _begin_forward(self) -> None:
        self._reads.begin()
        self._in_forward = not self._gather.is_current
        if self._in_forward:
            self._handled = sys.exc_info()[1]
        is_first = self._reads.awaited is None
        # Without gradients no backward could tell that a parameter was read too early.
        if self._in_forward and (is_first or not torch.is_grad_enabled()):
            self._run(self._gather.finish_all)
        if self._in_forward and is_first and torch.is_grad_enabled() and not is_opaque(self._root):
            self._reads.record()
        if not self._gather.is_current:
            self._waits = Waits()

    def _after_root(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._depth = max(self._depth - 1, 0)  # 0 where a hook before ours has raised
        if self._depth > 0 or not self._in_forward:
            return
        self._in_forward = False
        has_raised = sys.exc_info()[1] is not self._handled
        waits, self._waits, self._handled = self._waits, None, None
        read = self._reads.stop()
        is_whole = torch.is_grad_enabled() and not has_raised
        if self._reads.awaited is None:
            # Half a forward, or one for evaluation, may leave out what the next one reads.
            if is_whole:
                self._reads.learn(read)
            return
        self._run(self._gather.finish_all)
        if waits is not None and is_whole:
            self._reads.check(output, waits)
