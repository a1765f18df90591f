"""Steps as a trace that chrome://tracing and Perfetto show."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from farandole.pipelining._captions import Steps, captions, named
from farandole.pipelining._memory import memory_over_time
from farandole.pipelining._rows import Box, rows_of

# Names of chrome://tracing; Perfetto chooses colours by the names of events.
_COLOURS = {
    "F": "rail_response",
    "B": "thread_state_running",
    "I": "thread_state_runnable",
    "W": "thread_state_iowait",
    "OVERLAP_F_B": "detailed_memory_dump",
}


def chrome_trace(steps: Steps, *, memory: Sequence[Sequence[float]] | None = None) -> str:
    """JSON for chrome://tracing and https://ui.perfetto.dev.

    A process for each rank and step, with a thread of compute actions, threads of communication (messages from when
    they are sent to when they arrive where the step is simulated, else the calls) and, with ``memory``, a counter of
    the bytes held.

    Args:
        steps: a step, or {"predicted": ..., "measured": ...}; the ranks of the same number stand beside each other.
        memory: per stage, as in :func:`memory_over_time`.
    """
    shown = named(steps)
    events: list[dict[str, Any]] = []
    for index, (name, step) in enumerate(shown.items()):
        curves = None if memory is None else memory_over_time(step, memory)
        for rank, rows in enumerate(rows_of(step)):
            process = rank * len(shown) + index
            events.append(_metadata(process, 0, "process_name", name=f"rank {rank} {name}".rstrip()))
            events.append(_metadata(process, 0, "process_sort_index", sort_index=process))
            for thread, boxes in enumerate([rows.compute, *rows.lanes]):
                title = "compute" if thread == 0 else "communication"
                events.append(_metadata(process, thread, "thread_name", name=title))
                events.append(_metadata(process, thread, "thread_sort_index", sort_index=thread))
                events += [_event(box, process, thread) for box in boxes]
            for time, held in curves[rank].points if curves is not None else ():
                counter = {"ph": "C", "pid": process, "ts": _microseconds(time), "name": "memory"}
                events.append(counter | {"args": {"bytes": held}})
    document = {"displayTimeUnit": "ms", "otherData": {"caption": captions(shown)}, "traceEvents": events}
    return json.dumps(document) + "\n"


def _metadata(process: int, thread: int, what: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": args}


def _event(box: Box, process: int, thread: int) -> dict[str, Any]:
    start, end = _microseconds(box.start), _microseconds(box.end)
    event = {"ph": "X", "pid": process, "tid": thread, "ts": start, "dur": round(end - start, 3)}
    event |= {"name": box.name, "cat": box.kind}
    if box.kind in _COLOURS:
        event["cname"] = _COLOURS[box.kind]
    return event


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
