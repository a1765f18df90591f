"""Captures a step in a CUDA graph."""

from collections.abc import Callable
from typing import Any

import torch


class _Eagerly:
    """Stands for a graph where there is no GPU: runs again what a graph would replay."""

    def __init__(self, step: Callable[[], None]):
        self._step = step

    def replay(self) -> None:
        self._step()


def capture(step: Callable[[], None], warmups: int = 3) -> Any:
    """A graph of a step that has run on a stream of its own before, as torch's documentation of graphs has it."""
    if not torch.cuda.is_available():
        return _Eagerly(step)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmups):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph
