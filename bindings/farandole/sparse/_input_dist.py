"""input_dist of all pipelined modules of a model, ahead of the forward that uses it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Container
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from farandole._C import NoGrad, Presence
from farandole.sparse._agreement import Findings
from farandole.sparse._changes_ahead import ChangesAhead
from farandole.sparse._exchange import BATCH, END_OF_DATA, FAILED
from farandole.sparse._failed_steps import FailedSteps
from farandole.sparse._forms import other_forms
from farandole.sparse._in_flight import InFlight
from farandole.sparse._in_forward import InForward
from farandole.sparse._input_writes import InputWrites, is_by_value
from farandole.sparse._joint_steps import JointSteps
from farandole.sparse._preprocessing import preprocessed, writes_inputs
from farandole.sparse._sharded import is_torchrec
from farandole.sparse._verdict import Inputs
from farandole.sparse._wrong_inputs import KeyOrders, refuse_wrong_inputs

_SPLITS = "the exchange of splits"
_AGREEMENT = "agreement on what is pipelined"


class InputDist:
    """Starts, finishes and completes the input_dist of one batch after the other, in the same order on all ranks.

    The splits of torchrec's modules go round together, with who has the batch. Other modules, and what torchrec
    exchanges over groups of other ranks, follow when all ranks are known to have it. A rank that fails tells the
    others, who raise a FailedOnOthers for that batch; the next one goes on, unless ``refuse_lost()`` says that none can.

    Args:
        group: all ranks that train together. None is this rank alone.
        device: where the inputs are.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._joint = JointSteps(group, device)
        self._failed_steps = FailedSteps(self._joint)
        self.changes_ahead = ChangesAhead(self._joint)
        self.in_forward = InForward()
        self._modules: dict[str, nn.Module] = {}
        self._inputs: Callable[[InFlight], Inputs] | None = None
        self._torchrec: Any = None
        self._of_torchrec: list[str] = []
        self._writes_inputs = False
        self._held: dict[str, Any] = {}
        self._all_to_alls: dict[str, list[Any]] = {}  # of torchrec's modules, that have been used
        self._has_begun = False
        self._calls_made = 0
        self._orders = KeyOrders()
        self._had_turn = False  # after what makes it impossible to go on
        self._may_run_beside = True
        self._decided: Presence | None = None  # where no exchange is outstanding
        self._late: dict[str, tuple[Any, dict[str, Any]]] = {}  # inputs of modules that start in finish()
        self._unsent: list[tuple[str, Any]] = []  # with their modules
        self._packed: Any = None  # the data of these

    def take(self, modules: dict[str, nn.Module], inputs: Callable[[InFlight], Inputs], may_run_beside: bool) -> None:
        """From the next batch on: the pipelined modules by name, and what a batch gives them, in the same order;
        whether that may be computed beside a forward."""
        self._modules, self._inputs, self._may_run_beside = modules, inputs, may_run_beside
        self._of_torchrec = [name for name, module in modules.items() if is_torchrec(module)]
        self._writes_inputs = writes_inputs(modules)
        if self._of_torchrec:
            self._torchrec = importlib.import_module("farandole.sparse._torchrec")

    def renew(self) -> None:
        """On all ranks, between two batches: takes another group for exchanges where one was given up.

        Raises:
            RuntimeError: there is no use in it, since no group can be had, or what else the modules exchange over is out
                of step. Not before the batch that failed had its turn.
        """
        if self._joint.lost:
            if self._had_turn:
                self._joint.refuse_lost()
            self._had_turn = True
        elif self._joint.renew() and self._has_begun:
            self._hold_all()

    def agree(self, found: Findings, after_steps: bool = False) -> tuple[int, dict[int, Findings]]:
        """On all ranks, between two batches and before any input_dist: this rank, and what each has found; ``after_steps``:
        in one, which may have failed on others."""
        try:
            with self._failed_steps.meeting(_AGREEMENT) if after_steps else contextlib.nullcontext():
                words = self._joint.words(f"the {_AGREEMENT}", found.word())
        finally:
            self._had_turn = self._had_turn or bool(self._joint.lost)
        return self._joint.rank, {rank: Findings.of_word(word) for rank, word in words.items()}

    @property
    def is_lost(self) -> bool:
        """Whether no further step can be taken."""
        return bool(self._joint.lost)

    @property
    def is_given_up(self) -> bool:
        """Whether some rank has told the others that it has left an exchange."""
        return self._joint.group.given_up() is not None

    def step_failed(self, stage: str, batch: str, error: BaseException, model: nn.Module, patience: float) -> None:
        """The forward of a batch, say, has raised: waits so many seconds for that of all other ranks to do so, too. Else
        collectives of the model are out of step, and nothing can go on.

        Raises:
            FailedOnOthers: another rank has ended a collective of this one.
        """
        try:
            self._failed_steps.meet(stage, batch, error, model, patience)
        finally:
            self._had_turn = self._had_turn or bool(self._joint.lost)

    def may_run_beside(self, is_promised: bool) -> bool:
        """Not before it has been through the modules: until then forwards use the same groups. Nor where modules
        exchange over groups of their own, unless it is promised that no forward uses them."""
        if not (self._has_begun and self._may_run_beside):
            return False
        own = self._joint.group.group
        return is_promised or all(
            name in self._held and (own is None or all(group is own for group in self._held[name].groups))
            for name in self._modules
        )

    def start(self, number: int, flying: InFlight | None, presence: Presence, reason: str) -> None:
        error: Exception | None = None
        calls: dict[str, tuple[Any, dict[str, Any]]] = {}
        self._late, self._unsent, self._packed = {}, [], None
        if self._joint.lost:
            self._decided = FAILED
            self._joint.refuse_lost()
        in_forward = self.in_forward.left > 0
        if in_forward:  # on all ranks, whether they have the batch or not
            self.in_forward.left -= 1
        if flying is not None:
            flying.in_forward = in_forward
        if flying is not None and self._inputs is not None and not in_forward:
            try:
                calls = self._calls(flying, self._inputs)
                if self._has_begun:
                    self._orders.refuse_others(self._of_torchrec, flying.calls)
                    self._hold(flying, calls)
                else:  # before a module makes itself by them
                    refuse_wrong_inputs(self._modules, flying.calls)
                    self._orders = KeyOrders()
                    self._orders.refuse_others(self._of_torchrec, flying.calls)
            except Exception as raised:
                error = self._explained(raised, flying)
                presence, reason = FAILED, _told("input_dist", number, error)
        if not self._has_begun:
            self._begin(number, flying, calls, presence, reason)
        else:
            self._post(number, presence, reason, has_splits=not in_forward)
        if error is not None:
            raise error

    def finish(self, number: int, flying: InFlight | None) -> bool:
        """False at the end of the data on some rank."""
        if self._decided is not None:
            return self._decided != END_OF_DATA
        if self._joint.lost:
            self._joint.refuse_lost()
        try:
            said = self._joint.exchange.wait()
        except BaseException as error:
            self._joint.tell(_SPLITS, number, error)
            raise
        if said.presence == FAILED and flying is not None and self._joint.rank not in said.failed:
            raise said.error(number)
        if said.presence == BATCH and flying is not None:
            self._refuse_other_forms(said.rows)
            try:
                self._send_unsent(flying, said.rows)
            except BaseException as error:
                self._joint.tell("input_dist", number, error)
                raise
            self._dist_late(flying)
            flying.is_sent = True
        return said.presence != END_OF_DATA

    def refuse_other_keys(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Of features for a module, in a forward whose batch has not gone ahead.

        Raises:
            ValueError: torchrec's would mix them up.
        """
        if name in self._of_torchrec:
            self._orders.refuse_others([name], {name: (args, kwargs)})

    def complete(self, flying: InFlight, wait: Callable[[InFlight], None]) -> None:
        """``wait`` is for the data of all modules; where it raises on one rank, all skip the batch."""
        self._joint.step("the wait for its inputs", flying.number, lambda: wait(flying))

    def release(self) -> None:
        """The modules are as they were before."""
        for held in self._held.values():
            held.release()
        self._held.clear()

    def _calls(self, flying: InFlight, inputs_of: Callable[[InFlight], Inputs]) -> dict[str, Any]:
        with NoGrad():
            inputs = inputs_of(flying)
            flying.calls = dict(zip(self._modules, inputs, strict=True))
            calls = preprocessed(self._modules, flying.calls) if self._writes_inputs else flying.calls
        flying.owner = self
        by_value = is_by_value(self._calls_made)
        for name, (args, kwargs) in flying.calls.items():
            flying.writes[name] = InputWrites([*args, *kwargs.values()], by_value)
        self._calls_made += 1
        return calls

    def _explained(self, error: Exception, flying: InFlight) -> Exception:
        try:
            refuse_wrong_inputs(self._modules, flying.calls)
        except (TypeError, ValueError) as found:
            if found is not error and str(found) != str(error):
                found.__cause__ = error
                return found
        return error

    # torchrec's modules make their all-to-alls from the first batch that they see. So all ranks have one then, and no
    # rank tells how much others send before all have made them.
    def _begin(
        self, number: int, flying: InFlight | None, calls: dict[str, Any], presence: Presence, reason: str
    ) -> None:
        self._decided = FAILED
        try:
            said = self._joint.exchange.agree(presence, reason)
        except BaseException as error:
            self._joint.tell(_SPLITS, number, error)
            raise
        self._decided = said.presence
        if said.presence == FAILED and presence == BATCH:
            raise said.error(number)
        if said.presence != BATCH or flying is None or self._inputs is None:
            return
        self._decided = FAILED
        self._joint.step("input_dist", number, lambda: self._hold_first(flying, calls))
        self._has_begun = True
        self._post(number, presence, reason)

    def _post(self, number: int, presence: Presence, reason: str, has_splits: bool = True) -> None:
        self._decided = None
        try:
            self._joint.exchange.post(presence, self._rows() if has_splits and presence == BATCH else None, reason)
        except BaseException as error:
            self._joint.tell(_SPLITS, number, error)
            raise

    def _hold_first(self, flying: InFlight, calls: dict[str, Any]) -> None:
        self._late, self._unsent, self._packed = {}, [], None
        if self._torchrec is None:
            self._hold(flying, calls)
            return
        with self._torchrec.holding_all(self._over):
            self._hold(flying, calls, self._of_torchrec)
        used = {name: self._torchrec.all_to_alls_of(request) for name, request in flying.requests.items()}
        self._all_to_alls = {name: parts for name, parts in used.items() if parts is not None}
        self._hold_all()

    def _hold_all(self) -> None:
        self.release()
        for name, used in self._all_to_alls.items():
            self._held[name] = self._torchrec.HeldSplits(used, self._over)

    # The group of the exchange in place of another one of the same ranks, which others use at the same time.
    def _over(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        own = self._joint.group.group
        if own is None or dist.get_process_group_ranks(group) != dist.get_process_group_ranks(own):
            return group
        return own

    def _hold(self, flying: InFlight, calls: dict[str, Any], names: Container[str] | None = None) -> None:
        names = self._held if names is None else names
        own = self._joint.group.group
        for name, (args, kwargs) in calls.items():
            if name not in names:
                self._late[name] = args, kwargs
                continue
            module: Any = self._modules[name]
            with NoGrad():
                context = module.create_context()
                request = module.input_dist(context, *args, **kwargs)
            flying.contexts[name], flying.requests[name] = context, request
            for part in self._torchrec.unsent_of(request):
                if own is None or part.group is own:
                    self._unsent.append((name, part))
        if self._torchrec is not None:
            self._packed = self._torchrec.packed([part for _, part in self._unsent], self._joint.group)

    def _rows(self) -> list[list[int]]:
        rows: list[list[int]] = [[] for _ in range(self._joint.exchange.size)]
        for _, part in self._unsent:
            for row, columns in zip(rows, part.rows(), strict=True):
                row += columns
        return rows

    def _refuse_other_forms(self, rows: list[list[int]]) -> None:
        group = self._joint.group.group
        if group is None:
            return
        begin = 0
        for name, part in self._unsent:
            forms = [row[begin] for row in rows]
            if forms.count(part.form) != len(forms):
                raise other_forms(name, forms, dist.get_process_group_ranks(group))
            begin += part.columns

    def _send_unsent(self, flying: InFlight, rows: list[list[int]]) -> None:
        if self._torchrec is None:
            return
        begin = 0
        with NoGrad():
            parts = [part for _, part in self._unsent]
            for part in parts:
                end = begin + part.columns
                part.settle([row[begin:end] for row in rows])
                begin = end
            data = self._torchrec.send(parts, self._joint.group, self._packed)
            for name, request in flying.requests.items():
                flying.requests[name] = self._torchrec.sent(request, data)
        self._unsent, self._packed = [], None

    # Each of the two ends on all ranks before the next begins, since nothing else could tell that one rank has failed.
    def _dist_late(self, flying: InFlight) -> None:
        if not self._late:
            return
        modules = {name: self._modules[name] for name in self._late}
        requests: dict[str, Any] = {}

        def start(name: str) -> None:
            module: Any = modules[name]
            args, kwargs = self._late[name]
            flying.contexts[name] = module.create_context()
            requests[name] = module.input_dist(flying.contexts[name], *args, **kwargs)

        def send(name: str) -> None:
            flying.requests[name] = requests[name].wait()

        with NoGrad():
            self._joint.step_of_modules("input_dist", flying.number, modules, start)
            self._joint.step_of_modules("the wait for its splits", flying.number, modules, send)


def _told(stage: str, number: int, error: BaseException) -> str:
    return f"{stage} of batch {number}: {type(error).__name__}: {error}"
