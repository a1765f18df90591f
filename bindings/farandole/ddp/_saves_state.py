"""How the state of a distributed optimizer is saved and loaded."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from farandole.ddp import _optimizer_state as saved
from farandole.ddp import _state_hooks as state_hooks
from farandole.ddp import _state_loading as loading
from farandole.ddp._agreement import Facts
from farandole.ddp._lone_calls import named
from farandole.ddp._runs import Run
from farandole.ddp._whole import WholeParameters
from farandole.ddp._wrapper import DistributedDataParallel


class SavesState:
    """The part of the optimizer that gives its state away by the names of parameters, and takes it back."""

    _inner: torch.optim.Optimizer
    _models: Sequence[DistributedDataParallel]
    _runs: list[Run]
    _exchanges: list[WholeParameters]
    _names: list[list[str]]  # of parameters, by param group
    _expert_suffix: str | None
    _is_sharded: bool
    _has_stepped: bool
    _is_provisional: bool  # the state was made to be loaded into, and was not
    _finish_params: Callable[[], None]
    _publish: Callable[[], None]
    _agree_on_settings: Callable[[], None]
    _show_settings: Callable[[], None]
    _raising_together: Callable[[], contextlib.AbstractContextManager[Facts]]

    def state_dict(self) -> dict[str, Any]:
        """This rank's part of the state, by the names of parameters: for torch.distributed.checkpoint, or in memory.

        ``{"state": {name: {"exp_avg": part, ..., "param": part of the float32 copy}}, "param_groups": [...]}``, where
        parts know their place in the flattened parameter: a checkpoint can be loaded with another number of ranks or
        another bucket size. Where the optimizer has not stepped, or not some of its parameters, their state is made
        first, by a step that changes nothing, to be loaded into.
        """
        state_hooks.before_saving(self)
        self._check_names("state_dict()")
        if self._exchanges:
            self._finish_params()  # making the state steps in memory that is gathered into
        for run in self._runs:
            run.take_writes()
        self._agree_on_settings()
        self._initialize()
        return state_hooks.after_saving(self, saved.collect(self._inner, self._runs, self._names, self._has_stepped))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What :meth:`state_dict` or :meth:`full_state_dict` gave, or what torch.distributed.checkpoint has loaded.

        A collective: parameters of a shorter type become those of the float32 copies, on all ranks.

        Raises:
            ValueError: another number of param groups, a parameter or a state that is missing, one that this optimizer does
                not make, or parts that do not have what a rank owns, on any rank (those of another number of ranks: use full_state_dict() or a
                checkpoint). Then nothing has changed.
        """
        self._finish_params()
        with loading.undone_on_error(self._inner, self._runs, self._has_stepped), self._raising_together():
            self._check_names("load_state_dict()")
            state_dict = state_hooks.before_loading(self, state_dict)
            loading.check_form(state_dict)
            loading.take_settings(self._inner, self._names, state_dict)
            if not self._has_stepped:
                saved.forget(self._inner, self._runs)
            self._initialize()
            todo = loading.match(self._inner, self._runs, state_dict)
        for restore in todo:
            restore()
        self._show_settings()
        self._has_stepped = loading.has_stepped(state_dict)
        self._is_provisional = not self._has_stepped
        self._publish()
        state_hooks.after_loading(self)

    def full_state_dict(self) -> dict[str, Any]:
        """As :meth:`state_dict`, with whole tensors, flat, of all parameters on every rank. A collective."""
        # Experts differ also where nothing is sharded.
        is_local = not self._is_sharded and not self._expert_suffix
        part = self.state_dict()
        with named(
            "full_state_dict() is a collective: expected the call on all ranks, whichever saves what it returns"
        ):
            return saved.gather(part, None if is_local else self._models[0].replicas.group)

    def _initialize(self) -> None:
        is_made = saved.initialize(self._inner, self._runs, self._has_stepped)
        self._is_provisional = is_made or self._is_provisional

    def _check_names(self, what: str) -> None:
        if self._expert_suffix is None:
            raise NotImplementedError(
                f"{what}: expected groups of experts that are parts of process_group and make it up: else different "
                "experts have one name"
            )
