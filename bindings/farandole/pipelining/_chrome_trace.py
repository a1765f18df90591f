"""Steps as a trace that chrome://tracing and Perfetto show."""

from __future__ import annotations

from collections.abc import Sequence

from farandole import _trace_events as trace
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
    events: list[trace.Event] = []
    for index, (name, step) in enumerate(shown.items()):
        curves = None if memory is None else memory_over_time(step, memory)
        for rank, rows in enumerate(rows_of(step)):
            process = rank * len(shown) + index
            events += trace.process(process, f"rank {rank} {name}".rstrip())
            for thread, boxes in enumerate([rows.compute, *rows.lanes]):
                events += trace.thread(process, thread, "compute" if thread == 0 else "communication")
                events += [_event(box, process, thread) for box in boxes]
            for time, held in curves[rank].points if curves is not None else ():
                counter = {"ph": "C", "pid": process, "ts": trace.microseconds(time), "name": "memory"}
                events.append(counter | {"args": {"bytes": held}})
    return trace.document(events, caption=captions(shown))


def _event(box: Box, process: int, thread: int) -> trace.Event:
    event = trace.box(process, thread, box.name, box.kind, box.start, box.end)
    if box.kind in _COLOURS:
        event["cname"] = _COLOURS[box.kind]
    return event
