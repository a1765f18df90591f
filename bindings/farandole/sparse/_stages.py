"""The stages of a pipeline that the engine calls: load and input_dist."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from farandole._C import NoGrad, Presence, ProfilerRange
from farandole.sparse._batches import to_device
from farandole.sparse._caller import Caller, IteratorVariables
from farandole.sparse._contexts import NOTHING
from farandole.sparse._given import GivenBatches
from farandole.sparse._in_flight import InFlight
from farandole.sparse._input_dist import InputDist
from farandole.sparse._load_place import only_waits
from farandole.sparse._ranges import Ranges
from farandole.sparse._streams import Streams

_END = object()

T = TypeVar("T")


class Stages:
    """What BatchPipeline calls, from the thread of ``progress`` or from its own."""

    def __init__(
        self,
        device: torch.device,
        streams: Streams,
        group: dist.ProcessGroup | None,
        agrees_on_inputs: bool,
        has_custom_forward: bool,
        load_on_thread: bool | None,
        ranges: Ranges,
    ) -> None:
        self._device = device
        self._ranges = ranges
        self._streams = streams
        self._group = group
        self._agrees_on_inputs = agrees_on_inputs
        self._has_custom_forward = has_custom_forward
        self._source: Iterator[Any] = iter(())
        self._yielded = 0
        self._has_count = False  # of those that it has yielded
        self._load_on_thread = load_on_thread
        self.may_load_beside = False  # on another thread
        self._variables = IteratorVariables()
        self.input_dist: InputDist | None = None
        self.caller: Caller | None = None  # where other threads may run a stage
        self.autocast: Callable[[], contextlib.AbstractContextManager[Any]] = NOTHING
        self.is_training = True
        self.flying: dict[int, InFlight] = {}
        self.given = GivenBatches()
        self.unused: list[Any] = []
        self._failed: dict[int, str] = {}
        self._interrupt: BaseException | None = None

    def take_from(self, source: Iterator[Any]) -> bool:
        """Whether the source is new: another one, or that of a DataLoader with persistent workers which has begun
        anew, as the same object."""
        is_other = source is not self._source
        if is_other:
            self._has_count = hasattr(source, "_num_yielded")
            self.may_load_beside = only_waits(source) if self._load_on_thread is None else self._load_on_thread
            self._variables = IteratorVariables()
            self.given.begin_source()
        self._source = source
        before, self._yielded = self._yielded, _yielded_by(source) if self._has_count else 0
        return is_other or self._yielded < before

    def load(self, number: int) -> bool:
        ranges, copying = self._ranges, ProfilerRange(self._ranges.copy, number)
        try:
            with copying if ranges.is_next_in_copy else NOTHING, self._streams.on(self._streams.copy):
                self.given.before_next()
                with ProfilerRange(ranges.next_batch, number):
                    batch = self._next()
                if self._has_count:
                    self._yielded = _yielded_by(self._source)
                if batch is _END:
                    self.given.after_next(number, None, self._is_here())
                    return False
                if batch is None:  # with which torchrec's pipelines end, and leave the rest
                    raise TypeError(
                        "the iterator gave None: expected a batch. torchrec's pipelines take None for the end of the data: "
                        "let the iterator end there, by raise StopIteration in its __next__ or return in a generator"
                    )
                with NOTHING if ranges.is_next_in_copy else copying:
                    batch = self._run(to_device, batch, self._device)
                self.given.after_next(number, batch, self._is_here())
                self.flying[number] = InFlight(number, batch, self._has_custom_forward)
        except Exception as error:
            self._failed[number] = f"load of batch {number}: {type(error).__name__}: {error}"
            if not self._is_here() and hasattr(error, "add_note"):  # Python 3.11
                error.add_note("on a thread of the pipeline's own; load_on_thread=False loads on the caller's")
            raise
        except BaseException as interrupt:  # Ctrl-C, say, which is not to wait for the batch's turn
            self._interrupt = interrupt
            self._failed[number] = f"load of batch {number}: interrupted by {type(interrupt).__name__}"
            raise RuntimeError(
                f"batch {number} is skipped: its load was interrupted by {type(interrupt).__name__}"
            ) from interrupt
        return True

    def _next(self) -> Any:
        if not self.may_load_beside:
            return next(self._source, _END)
        assert self.caller is not None
        return self._variables.run(self.caller, next, self._source, _END)

    def _is_here(self) -> bool:
        return self.caller is None or self.caller.is_here()

    def _run(self, call: Callable[..., T], *args: Any) -> T:
        return call(*args) if self.caller is None else self.caller.run(call, *args)

    def raise_interrupt(self, error: Exception | None = None) -> None:
        """Passes on what has interrupted a load; that of this error alone, where one is given."""
        interrupt = self._interrupt
        if interrupt is None or (error is not None and error.__cause__ is not interrupt):
            return
        self._interrupt = None
        raise interrupt

    def start_dist(self, number: int, presence: Presence) -> None:
        self._run(self._start_dist, number, presence)

    def finish_dist(self, number: int) -> bool:
        return self._run(self._finish_dist, number)

    def complete_dist(self, number: int) -> None:
        self._run(self._complete_dist, number)

    def _start_dist(self, number: int, presence: Presence) -> None:
        assert self.input_dist is not None
        with ProfilerRange(self._ranges.start_dist, number), self._streams.on(self._streams.dist):
            flying = self.flying.get(number)
            if flying is not None:
                self._streams.hand_over(self._streams.copy, flying.batch)
                flying.is_training = self.is_training
            with self.autocast():
                self.input_dist.start(number, flying, presence, self._failed.pop(number, ""))

    def _finish_dist(self, number: int) -> bool:
        assert self.input_dist is not None
        with ProfilerRange(self._ranges.wait_dist, number), self._streams.on(self._streams.dist):
            return self.input_dist.finish(number, self.flying.get(number))

    def _complete_dist(self, number: int) -> None:
        assert self.input_dist is not None
        flying = self.flying[number]
        if self._agrees_on_inputs:
            self.input_dist.complete(flying, self._complete_and_check)
            return
        try:
            self._complete(flying)
        except Exception as error:
            if self.input_dist.is_given_up:  # the others skip the batch
                raise
            flying.error = error  # in the forward, which they may be in

    def _complete(self, flying: InFlight) -> None:
        for name in list(flying.requests):
            self.complete_one(flying, name)

    def _complete_and_check(self, flying: InFlight) -> None:
        self._complete(flying)
        self.given.refuse(flying.number)
        if flying.error is not None:
            raise flying.error

    def complete_one(self, flying: InFlight, name: str, range_: str = "## wait_sparse_data_dist ##") -> None:
        """Waits for the data of a module."""
        with ProfilerRange(range_, flying.number), self._streams.on(self._streams.dist), NoGrad():
            flying.data[name] = flying.requests.pop(name).wait()

    def next_sent(self) -> InFlight | None:
        """The batch after the one that computes, once its data is under way."""
        ahead = min(self.flying, default=None)
        return self.flying[ahead] if ahead is not None and self.flying[ahead].is_sent else None

    @property
    def has_more(self) -> bool:
        """Whether a batch is loaded, or has failed in that and has not said so."""
        return bool(self.flying or self._failed)

    def agree_on_more(self, has_more: bool) -> bool:
        if self._group is None:
            return has_more
        fewest = torch.tensor([int(has_more)], device=self._device)
        dist.all_reduce(fewest, dist.ReduceOp.MIN, group=self._group)
        return bool(fewest.item())

    def discard(self, number: int, has_failed: bool) -> None:
        self._failed.pop(number, None)
        self.given.forget(number)
        flying = self.flying.pop(number, None)
        if flying is None:
            return
        if flying.run is not None:
            with self._streams.on(self._streams.dist):
                why = flying.run.take_back()
            if why is not None:
                names = ", ".join(map(repr, flying.run.modules))
                warnings.warn(
                    f"batch {number} is not computed, and what {names} wrote for it ahead of its forward stays, since {why}",
                    stacklevel=3,
                )
        if not has_failed:
            self.unused.append(flying.batch)

    def take(self, number: int) -> InFlight:
        self.given.taken(number)
        return self.flying.pop(number)


def _yielded_by(source: Iterator[Any]) -> int:
    count = getattr(source, "_num_yielded", 0)  # of torch's DataLoader
    return count if isinstance(count, int) else 0
