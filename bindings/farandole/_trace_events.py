"""Chrome's trace format, which chrome://tracing and https://ui.perfetto.dev show: a process has threads, these have boxes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

Event = dict[str, Any]


class Lasting(Protocol):
    """Something with a start and an end in seconds."""

    @property
    def start(self) -> float: ...
    @property
    def end(self) -> float: ...


_Box = TypeVar("_Box", bound=Lasting)


def process(pid: int, name: str) -> list[Event]:
    """Its name, and its place among the others: by pid."""
    return [
        _metadata(pid, 0, "process_name", name=name),
        _metadata(pid, 0, "process_sort_index", sort_index=pid),
    ]


def thread(pid: int, tid: int, name: str) -> list[Event]:
    """Its name, and its place within the process: by tid."""
    return [
        _metadata(pid, tid, "thread_name", name=name),
        _metadata(pid, tid, "thread_sort_index", sort_index=tid),
    ]


def box(pid: int, tid: int, name: str, category: str, start: float, end: float) -> Event:
    """Boxes of one thread must not overlap: see :func:`lanes`."""
    first, last = microseconds(start), microseconds(end)
    event = {"ph": "X", "pid": pid, "tid": tid, "ts": first, "dur": round(last - first, 3)}
    return event | {"name": name, "cat": category}


def moment(pid: int, tid: int, name: str, category: str, time: float) -> Event:
    return {"ph": "i", "s": "t", "pid": pid, "tid": tid, "ts": microseconds(time), "name": name, "cat": category}


def document(events: Iterable[Event], **other: Any) -> str:
    """The whole file. ``other`` is shown beside it."""
    return json.dumps({"displayTimeUnit": "ms", "otherData": other, "traceEvents": list(events)}) + "\n"


def lanes(boxes: Iterable[_Box]) -> list[list[_Box]]:
    """As few as hold them all without overlap."""
    found: list[list[_Box]] = []
    for one in sorted(boxes, key=lambda one: (one.start, one.end)):
        free = next((lane for lane in found if lane[-1].end <= one.start), None)
        if free is None:
            found.append([one])
        else:
            free.append(one)
    return found


def microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _metadata(pid: int, tid: int, what: str, **args: Any) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": what, "args": args}
