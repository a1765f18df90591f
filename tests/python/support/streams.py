"""Streams of an accelerator that is not there, and tensors that know on which stream they were made and used.

All work is done at once, on the CPU. What is checked is what would keep it right where streams run beside each other:
who uses a tensor on another stream than the one that made it has waited for that stream since, and has the allocator
told (``record_stream``), which else gives the memory to others as soon as the tensor is gone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree


class Stream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: dict[Stream, int] = {self: 0}  # so far it has waited for the others, and come itself

    def wait_stream(self, other: Stream) -> None:
        for stream, tick in other.seen.items():
            self.seen[stream] = max(tick, self.seen.get(stream, 0))

    def __repr__(self) -> str:
        return self.name


class Memory:
    """Of a tensor and its views."""

    def __init__(self, stream: Stream, what: str) -> None:
        self.stream = stream
        self.what = what
        self.used: dict[Stream, str] = {}
        self.recorded: set[Stream] = set()


class Device:
    """In place of torch.cuda: what ``Streams`` asks of it, with one current stream for each thread."""

    def __init__(self) -> None:
        self.default = Stream("default")
        self._made: list[Stream] = []
        self._current = threading.local()
        self._memories: list[Memory] = []
        self.unwaited: list[str] = []

    def Stream(self, device: torch.device, priority: int) -> Stream:  # noqa: N802, torch's name
        self._made.append(Stream(("copy", "dist", "prefetch")[len(self._made) % 3]))
        return self._made[-1]

    def current_stream(self, device: torch.device | None = None) -> Stream:
        return getattr(self._current, "stream", self.default)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current_stream()
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = before

    def device(self, device: torch.device) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def tensor(self, value: torch.Tensor) -> Tracked:
        """The tensor, as the current stream has made it."""
        tracked = value.detach().clone().as_subclass(Tracked)
        self.made(tracked, "a copy")
        return tracked

    def made(self, tensor: Tracked, what: str, memory: Memory | None = None) -> None:
        stream = self.current_stream()
        stream.seen[stream] += 1
        if memory is None:
            memory = Memory(stream, what)
            self._memories.append(memory)
        tensor.device_of = self
        tensor.memory = memory
        tensor.written = (stream, stream.seen[stream])

    def uses(self, tensor: Tracked, what: str) -> None:
        stream, (writer, tick) = self.current_stream(), tensor.written
        tensor.memory.used.setdefault(stream, what)
        if stream is not writer and stream.seen.get(writer, 0) < tick:
            self.unwaited.append(f"{what} on {stream} has not waited for {writer}, which made {tensor.memory.what}")

    def unrecorded(self) -> list[str]:
        """Uses of which the allocator does not know."""
        return [
            f"{what} on {stream} of {memory.what}, which {memory.stream} made"
            for memory in self._memories
            for stream, what in memory.used.items()
            if stream is not memory.stream and stream not in memory.recorded
        ]


class Tracked(torch.Tensor):
    device_of: Device
    memory: Memory
    written: tuple[Stream, int]

    def record_stream(self, stream: Stream) -> None:
        self.memory.recorded.add(stream)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        given = [part for part in pytree.tree_leaves((args, kwargs or {})) if isinstance(part, Tracked)]
        known = [part for part in given if hasattr(part, "memory")]
        result = super().__torch_function__(func, types, args, kwargs)
        if not known:
            return result
        device = known[0].device_of
        if name in _NO_WORK:
            for part in pytree.tree_leaves(result):
                if isinstance(part, Tracked) and not hasattr(part, "memory"):
                    part.device_of, part.memory, part.written = device, known[0].memory, known[0].written
            return result
        for part in known:
            device.uses(part, name)
        for part in pytree.tree_leaves(result):
            if isinstance(part, Tracked) and not any(part is each for each in given):
                base = [each.memory for each in known if _place(each) == _place(part)]
                device.made(part, f"the result of {name}", base[0] if base else None)
            elif isinstance(part, Tracked) and name.endswith("_"):
                device.made(part, f"the result of {name}", part.memory)
        return result


def _place(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.untyped_storage().data_ptr()


# What reads a tensor's description only.
_NO_WORK = {"__get__", "dim", "size", "data_ptr", "numel", "detach", "requires_grad_", "is_inference", "element_size"}


class OnHost:
    """A tensor before its copy."""

    def __init__(self, device: Device, value: torch.Tensor) -> None:
        self._device, self._value = device, value

    def to(self, device: torch.device, non_blocking: bool = False) -> Tracked:
        return self._device.tensor(self._value)

    def record_stream(self, stream: Stream) -> None:
        raise AssertionError("host memory has no streams")
