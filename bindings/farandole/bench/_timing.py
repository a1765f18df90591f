"""The loop that all peers of a benchmark share."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import perf_counter

from farandole.bench._series import Sample


def time_each(operation: Callable[[], None], count: int, samples: int, parts: int = 1) -> list[Sample]:
    """Runs ``operation`` samples x count times; seconds of a ``parts``-th of one run, summarized for each sample."""
    result = []
    for _ in range(samples):
        ends = [perf_counter()]
        for _ in range(count):
            operation()
            ends.append(perf_counter())
        taken = [end - start for start, end in zip(ends, ends[1:], strict=False)]
        result.append(Sample(statistics.median(taken) / parts, (ends[-1] - ends[0]) / count / parts))
    return result
