"""What rounds of data parallelism did, and when."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist

from farandole import _C
from farandole import _trace_events as trace
from farandole._clocks import clock_offset

if TYPE_CHECKING:
    from farandole.ddp._param_sync import ParamSync
    from farandole.ddp._tuning import BucketTuner

_UNSEEN = " (seen to be over)"
# By row of the picture: the kinds of events in it.
_ROWS = {
    "parameters": ("ready",),
    "buckets": ("reduction",),
    "waits": ("wait", "report", "gather_wait"),
    "gathers": ("gather",),
}


class TimelineEvent(NamedTuple):
    """Something that lasted from start to end, in seconds of ``time.monotonic()`` (gathered: of the first rank's)."""

    rank: int  # in the world
    round: int  # which backward that synchronizes, from 0; gathers of parameters come before it
    kind: str  # "ready" (of a gradient: lasts no time), "reduction", "wait", "report", "gather" or "gather_wait"
    name: str  # of the parameter or the bucket
    start: float
    end: float
    is_exact: bool  # else it was seen to be over at ``end``, and may have been before: always so on CUDA


class Timeline:
    """Of one rank, or, gathered, of several; made by ``DistributedDataParallel.record_timeline``.

        with model.record_timeline() as timeline:
            for batch in batches:
                step(batch)
        Path("rounds.json").write_text(timeline.gather().chrome_trace())

    "ready" is when a gradient had come, "reduction" lasts from when a bucket was issued until it was reduced. At the
    end of backward the ranks "wait" for all reductions and "report" to each other. With a distributed optimizer
    "gather" brings the parameters of a bucket, and "gather_wait" is what a forward or a step waited for it.

    Times are the host's. On CUDA work has not ended when the host has gone on, so that ends are not exact there.
    """

    def __init__(
        self,
        recorded: _C.GradTimeline | None,
        parameters: Sequence[str],
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._recorded = recorded
        self._parameters = parameters
        self._group = group
        self._device = device
        self._gathered: list[TimelineEvent] | None = None

    @property
    def rounds(self) -> int:
        """How many have ended."""
        return self._recorded.rounds if self._recorded is not None else 0

    def events(self) -> list[TimelineEvent]:
        """In the order in which they began; not those that are still under way."""
        if self._gathered is not None:
            return self._gathered
        events = []
        rank = dist.get_rank()
        for kind, index, number, start, end, is_exact in self._recorded.events() if self._recorded is not None else ():
            if end is not None:
                name = self._parameters[index] if kind == _C.GradEvent.ready else _name_of(kind, index)
                events.append(TimelineEvent(rank, number, kind.name, name, start, end, is_exact))
        return events

    def gather(self) -> Timeline:
        """That of all ranks of ``process_group``, on one clock, on each of them: a collective.

        Clocks of several hosts are compared by messages, to half of a round trip.
        """
        offset = clock_offset(self._group, self._device)
        mine = [event._replace(start=event.start - offset, end=event.end - offset) for event in self.events()]
        ranks: list[list[TimelineEvent]] = [[] for _ in range(self._group.size())]
        dist.all_gather_object(ranks, mine, group=self._group)
        gathered = Timeline(None, self._parameters, self._group, self._device)
        gathered._gathered = [event for of_rank in ranks for event in of_rank]
        return gathered

    def chrome_trace(self) -> str:
        """JSON for chrome://tracing and https://ui.perfetto.dev.

        A process for each rank, by its number in the world, with rows of parameters, buckets, waits and gathers. The
        "traceEvents" of several ranks' files may be put into one: they have one clock where they are of one host.
        """
        events = self.events()
        shown: list[trace.Event] = []
        for rank in sorted({event.rank for event in events}):
            shown += trace.process(rank, f"rank {rank}")
            tid = 0
            for title, kinds in _ROWS.items():
                mine = [event for event in events if event.rank == rank and event.kind in kinds]
                for lane in [mine] if title == "parameters" else trace.lanes(mine):
                    shown += trace.thread(rank, tid, title)
                    shown += _drawn(lane, tid)
                    tid += 1
        return trace.document(shown)


class RecordsTimeline:
    """The part of the wrapper that records its rounds."""

    _reducer: _C.GradReducer
    _param_sync: ParamSync | None
    _tuner: BucketTuner | None
    _timeline: _C.GradTimeline | None
    _trainable: dict[str, torch.nn.Parameter]
    process_group: dist.ProcessGroup
    device: torch.device

    @contextlib.contextmanager
    def record_timeline(self) -> Iterator[Timeline]:
        """Records what happens inside, and when: gradients, buckets, waits, gathers. See :class:`Timeline`.

        It costs nothing outside, and inside a few clock readings.
        """
        if self._tuner is not None and self._tuner.is_pending:
            raise RuntimeError(
                "record_timeline(): bucket_size='auto' has not chosen yet: expected a number of elements, or more steps before"
            )
        before, recorded = self._timeline, _C.GradTimeline()
        self._record(recorded)
        try:
            yield Timeline(recorded, list(self._trainable), self.process_group, self.device)
        finally:
            self._record(before)

    def _record(self, timeline: _C.GradTimeline | None) -> None:
        self._timeline = timeline
        self._reducer.record(timeline)
        if self._param_sync is not None:
            self._param_sync.record(timeline)


def _name_of(kind: _C.GradEvent, bucket: int) -> str:
    return {
        "reduction": f"bucket {bucket}",
        "wait": "wait for buckets",
        "report": "agree that all is well",
        "gather": f"gather of bucket {bucket}",
        "gather_wait": f"wait for gather of bucket {bucket}",
    }[kind.name]


def _drawn(lane: Iterable[TimelineEvent], tid: int) -> Iterable[trace.Event]:
    for event in lane:
        if event.kind == "ready":
            drawn = trace.moment(event.rank, tid, event.name, event.kind, event.start)
        else:
            name = event.name if event.is_exact else event.name + _UNSEEN
            drawn = trace.box(event.rank, tid, name, event.kind, event.start, event.end)
        yield drawn | {"args": {"round": event.round}}
