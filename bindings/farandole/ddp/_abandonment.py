"""A rank that fails tells the others, which would wait for its gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from farandole import _C
from farandole._rank_names import rank_name

if TYPE_CHECKING:
    from farandole.ddp._param_sync import ParamSync

# How a reducer's error begins that all ranks have: with the rank that found it.
_TROUBLE = ("farandole.ddp: rank ", "farandole.ddp: a rank of another optimizer instance")


def _is_of_all(error: BaseException) -> bool:
    """Whether it is one that a round ended with on every rank."""
    return isinstance(error, RuntimeError) and str(error).startswith(_TROUBLE)


class AbandonsGroup:
    """The part of the wrapper that gives the group up."""

    process_group: dist.ProcessGroup
    _reducer: _C.GradReducer
    _no_sync_depth: int
    _param_sync: ParamSync | None
    _options: _C.ReducerOptions
    _trainable: dict[str, torch.nn.Parameter]
    _rounds_of_step = 1  # of the last one inside abandon_on_error() that reduced

    def abandon(self, reason: str) -> None:
        """Gives the group up, for a rank that failed and will not reduce the gradients that the others reduce.

        Every rank of the group that waits for the reduction, or comes to it, gets a RuntimeError at once that names
        this rank and the reason. The group is aborted, for whoever else uses it, too; from then on this wrapper's
        forward raises, and gradients are left alone: wrap the module again, over a new group. The first reason given
        counts.

        What the others learn at once depends on the backend: farandole tells all ranks. Gloo has no abort; a rank
        that waits looks every 200 ms whether the group was given up, and the operation that is left behind keeps a
        thread until the group's timeout. Over other backends ranks that already wait may do so until the timeout,
        and then raise with the reason. On GPUs a rank that has learned of it aborts the group as well: what is under
        way there would stay.
        """
        self._reducer.abandon(f"{rank_name(self.process_group)} abandoned the data-parallel group: {reason}")

    @contextlib.contextmanager
    def abandon_on_error(self) -> Iterator[None]:
        """Calls :meth:`abandon` when what is inside raises, and lets the error pass.

        For a whole step, forward and backward: ``with model.abandon_on_error(): loss_fn(model(x), y).backward()``.
        With ``use_distributed_optimizer`` the optimizer's step belongs inside, too: others wait for what it gathers.
        An error after which all ranks are still in step (parameters that got no gradient) abandons nothing. Of several
        backwards that average it must come after as many as the step before had: the others wait for the rest.
        """
        self._reducer.begin_step()
        reducer, before = self._reducer, self._reducer.rounds()

        def rounds() -> int:
            began = before if self._reducer is reducer else 0  # bucket_size="auto" makes another
            return self._reducer.rounds() - began

        try:
            yield
        except BaseException as error:
            if not self._is_in_step(error, rounds()):
                self.abandon(f"{type(error).__name__}: {error}")
            raise
        self._rounds_of_step = rounds() or self._rounds_of_step

    def _is_in_step(self, error: BaseException, rounds: int) -> bool:
        """Whether the others wait for nothing that comes after the error, and after so many rounds of this step."""
        if not self._reducer.is_synchronized():
            return False
        if rounds < self._rounds_of_step and not _is_of_all(error):
            return False
        sync = self._param_sync
        return sync is None or sync.updated_after == self._reducer.rounds() or _is_of_all(error)

    def _settle_step(self) -> None:
        """For a caller of _set_require_sync, after a step that is to reduce: reduces where no backward of it has, since
        the last one came to no parameter; other ranks may wait for that.
        """
        is_left = self._no_sync_depth == 0 and self._options.ends_with_backward and not self._reducer.is_synchronized()
        if is_left and any(parameter.requires_grad for parameter in self._trainable.values()):
            self._reducer.start_sync()
            self._reducer.finish_sync()

    def _abandon_step(self, reason: str) -> None:
        """For a caller of _set_require_sync: abandons the group unless this step has reduced, or is not to."""
        if self._no_sync_depth == 0 and not self._reducer.is_synchronized():
            self.abandon(reason)
