"""Steps that all ranks take together, and after which each knows whether another one has failed."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from farandole import _C
from farandole._C import Presence
from farandole.sparse._exchange import BATCH, FAILED, SKIPPED, SplitsExchange
from farandole.sparse._exchange_group import ExchangeGroup, FailedOnOthers, GivenUp
from farandole.sparse._gloo_waits import looking_after
from farandole.sparse._groups import forget_group_of_its_own, group_of_its_own, times_given_up

# So long others may take to start what this rank could not, before it is supposed that they wait for it inside.
PATIENCE = 1.0
# Most of a module's attributes; isinstance() of a group is slow, and asked in each step.
_NO_GROUPS = {bool, int, float, str, list, tuple, dict, set, OrderedDict, type(None)}


class JointSteps:
    """What all ranks that train together do at the same time: each exchange tells every rank who has failed.

    Args:
        group: all ranks that train together. None is this rank alone.
        device: where tensors for the group have to be.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self._parent = group
        self._device = device
        self.lost = ""  # why no further step can be taken
        self._make()

    def _make(self) -> None:
        self.group = ExchangeGroup(group_of_its_own(self._parent, self._device), self._device)
        self.exchange = SplitsExchange(self.group)
        self._times_given_up = times_given_up()

    @property
    def rank(self) -> int:
        """Of all ranks."""
        return 0 if self._parent is None else dist.get_rank()

    def renew(self) -> bool:
        """Whether another group has taken the place of one that was given up."""
        if self.lost or self._times_given_up == times_given_up():
            return False
        if group_of_its_own(self._parent, self._device) is self.group.group:
            self._times_given_up = times_given_up()
            return False
        columns = self.exchange.columns
        self._make()
        self.exchange.expect(columns)
        return True

    def refuse_lost(self) -> None:
        """
        Raises:
            RuntimeError: no further step can be taken.
        """
        if self.lost:
            raise RuntimeError(
                f"the pipeline cannot be used again: {self.lost}. Expected a new one, over groups that were made anew "
                "and a model sharded over them"
            )

    def tell(self, stage: str, number: int | None, error: BaseException) -> None:
        """Of an error where others may come to wait for this rank: it is theirs, for the batch of this number, or none.

        Raises:
            FailedOnOthers: another rank was the first to fail.
        """
        if isinstance(error, FailedOnOthers) or self._device.type != "cpu" or self.group.size == 1:
            return
        first = self.group.give_up(error, stage if number is None else f"{stage} of batch {number}")
        forget_group_of_its_own(self._parent)
        if first.is_lost:
            self.lost = _said_of(first)
        if first.rank != self.rank:
            skipped = "" if number is None else f"{SKIPPED.format(number)}\n"
            raise FailedOnOthers(f"{skipped}rank {first.rank}, {first.what}") from error

    def hears_of_loss(self) -> bool:
        """Whether another rank has said that no further step can be taken."""
        first = self.group.given_up() if self._device.type == "cpu" else None
        if first is not None and first.is_lost:
            self.lost = _said_of(first)
        return bool(self.lost)

    def lose(self, where: str, error: BaseException, model: nn.Module) -> None:
        """No further step can be taken, since this rank has failed outside of them. Others, who may wait for it in
        collectives of the model, are told, and end these where their backend can (gloo's cannot)."""
        first = GivenUp(self.rank, f"{where}: {type(error).__name__}: {error}", True)
        if self._device.type == "cpu":
            first = self.group.give_up(error, where, is_lost=True)
            forget_group_of_its_own(self._parent)
        self.lost = _said_of(first)
        for group in {id(each): each for each in (*_groups_of(model), self._parent)}.values():
            with contextlib.suppress(RuntimeError):  # the error that led here says more
                _C.abandon_group(group, self.lost)

    def words(self, stage: str, word: str) -> dict[int, str]:
        """What all ranks say, by rank; between two batches. Costs a meeting, and more where they say different things.

        Raises:
            FailedOnOthers: another rank has not come to it.
        """
        if self._parent is None or self.group.size == 1:
            return {self.rank: word}
        place = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=7).digest(), "big")
        try:
            if len({row[0] for row in self.exchange.agree(BATCH, place=place).rows}) == 1:
                return dict.fromkeys(dist.get_process_group_ranks(self._parent), word)
            return self.exchange.agree(FAILED, word).failed
        except BaseException as error:
            self.tell(stage, None, error)
            raise

    def step(self, stage: str, number: int, call: Callable[[], None]) -> None:
        """A call that waits for no rank that has failed in it: the other ranks end theirs.

        Raises:
            FailedOnOthers: the calls of other ranks have.
        """
        try:
            error = _error_of(call)
            if error is not None and self.group.has_failed:
                raise error
            said = self.exchange.agree(*_presence(stage, number, error))
        except BaseException as out_of_step:
            self.tell(stage, number, out_of_step)
            raise
        if error is not None:
            raise error
        if said.failed:
            raise said.error(number)

    def step_of_modules(
        self, stage: str, number: int, modules: dict[str, nn.Module], call: Callable[[str], None]
    ) -> None:
        """Calls of modules, by name, that exchange over groups of their own. Those of a module that has failed on some
        ranks only are out of step, and given up; this rank's fail then as well.

        Raises:
            FailedOnOthers: the calls of other ranks have.
        """
        failed, error, woken = 0, None, ""
        for place, name in enumerate(modules, 1):
            groups = _groups_of(modules[name]) or [dist.group.WORLD] if self.group.group else []
            with looking_after(groups, self._device):
                error = _error_of(lambda name=name: call(name))  # type: ignore[misc]
            if error is not None:
                failed, stage = place, f"{stage} of {name}"
                break
        try:
            presence, reason = _presence(stage, number, error)
            if error is not None:
                module = list(modules.values())[failed - 1]
                woken = _abandonment_of_groups_of(module)
            if woken:  # its failure is that of another rank, which says so
                failed, reason = -failed, ""
            if error is None:
                said = self.exchange.agree(presence, reason, failed)
            else:
                self.exchange.post_agreement(presence, reason, failed)
                self._wake(module, f"rank {self.rank}, {reason}")
                said = self.exchange.wait()
        except BaseException as out_of_step:
            self.tell(stage, number, out_of_step)
            raise
        if not said.failed:
            return
        places = {row[0] for row in said.rows}
        if len(places) > 1:
            reasons = "\n".join(f"rank {rank}, {reason}" for rank, reason in said.failed.items() if reason)
            self.lost = f"a sharded module is out of step, since it has failed on some ranks only ({reasons})"
            for place in places - {0}:
                _give_up_groups_of(list(modules.values())[abs(place) - 1], self.lost)
        if woken:
            raise FailedOnOthers(f"{SKIPPED.format(number)}\n{woken}") from error
        if error is not None:
            raise error
        raise said.error(number)

    # Others who wait inside of what this rank has left get no further without it.
    def _wake(self, module: nn.Module, why: str) -> None:
        until = time.monotonic() + PATIENCE
        while not self.exchange.has_come():
            if time.monotonic() > until:
                _give_up_groups_of(module, why, [dist.group.WORLD])
                return
            time.sleep(0.005)


def _said_of(first: GivenUp) -> str:
    return f"rank {first.rank} has failed in {first.what}"


def _error_of(call: Callable[[], None]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


def _presence(stage: str, number: int, error: BaseException | None) -> tuple[Presence, str]:
    if error is None:
        return BATCH, ""
    return FAILED, f"{stage} of batch {number}: {type(error).__name__}: {error}"


def _give_up_groups_of(module: nn.Module, why: str, default: Sequence[Any] = ()) -> None:
    for group in _groups_of(module) or default:
        _C.abandon_group(group, why)


def _abandonment_of_groups_of(module: nn.Module) -> str:
    return next(filter(None, map(_C.abandonment_of, _groups_of(module))), "")


def _groups_of(module: nn.Module) -> list[Any]:
    """Those that it has among its attributes."""
    found: dict[int, dist.ProcessGroup] = {}
    for child in module.modules():
        values: list[Any] = [*vars(child).values(), getattr(vars(child).get("_env"), "process_group", None)]
        groups = (value for value in values if type(value) not in _NO_GROUPS and isinstance(value, dist.ProcessGroup))
        found.update((id(value), value) for value in groups)
    return list(found.values())
