"""Long-lived ranks, each a process with every peer's group, so that the peers share one noise."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

RANKS = 2  # of most subjects
BACKENDS = ("farandole", "gloo", "fake")
_START_SECONDS = 120.0
# Children are forked from a server that has imported torch once: they start in no time, and clean.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "farandole"])


@dataclass
class Rank:
    """What a function that runs on a rank gets."""

    rank: int
    size: int
    groups: dict[str, Any]  # by backend; none where it was asked for none
    state: dict[Any, Any] = field(default_factory=dict)  # lives from call to call

    @property
    def peer(self) -> int:
        return 1 - self.rank


class Ranks:
    """Runs functions of this package on all ranks at once. Use as a context manager.

    Thread: the one that made it. The processes end with it, whatever they do.

    Args:
        size: how many.
        backends: those that every rank gets a group of; the first is the default group.
        environment: variables that are set in each process before its groups are made.
        enter: called with the rank first of all in its process (``Hosts.enter()`` gives one).
    """

    def __init__(
        self,
        size: int,
        backends: Sequence[str] = BACKENDS,
        environment: Mapping[str, str] | None = None,
        enter: Callable[[int], None] | None = None,
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="farandole-bench-")
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = _context.Pipe()
            args = (theirs, rank, size, store, tuple(backends), dict(environment or {}), enter)
            process = _context.Process(target=_serve, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        try:
            self._collect(_START_SECONDS)
        except BaseException:
            self._end(patience=0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # After an error a rank may wait for the other one for ever.
        self._end(patience=10 if error is None else 0)

    def call(self, fn: Callable[..., Any], *, timeout: float = 300.0, **kwargs: Any) -> list[Any]:
        """``fn(rank, **kwargs)`` on all ranks; the results by rank.

        Raises:
            RuntimeError: a rank raised (with its traceback), died, or took longer than ``timeout`` seconds.
        """
        for pipe in self._pipes:
            pipe.send((fn, kwargs))
        return self._collect(timeout)

    def _end(self, patience: float) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=patience)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()

    def _collect(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        results: dict[int, Any] = {}
        waiting = dict(zip(self._pipes, range(len(self._pipes)), strict=True))
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RuntimeError(f"no answer from ranks {sorted(waiting.values())} in {timeout:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = waiting.pop(pipe)
                try:
                    succeeded, value = pipe.recv()
                except EOFError:
                    raise RuntimeError(f"rank {rank} died") from None
                if not succeeded:
                    raise RuntimeError(f"rank {rank} failed:\n{value}")
                results[rank] = value
        return [results[rank] for rank in range(len(self._pipes))]


class RankPair(Ranks):
    """The two ranks that subjects share."""

    def __init__(self) -> None:
        super().__init__(RANKS)


def transport(rank: Rank) -> str:
    """Runs on a rank: what carries farandole's messages to the other one."""
    import farandole

    return farandole.transport_report()[rank.peer]


def _serve(
    pipe: Connection,
    rank: int,
    size: int,
    store: str,
    backends: Sequence[str],
    environment: dict[str, str],
    enter: Callable[[int], None] | None,
) -> None:
    import torch
    import torch.distributed as dist

    try:
        os.environ.update(environment)
        if enter is not None:
            enter(rank)
        torch.set_num_threads(1)
        context = Rank(rank, size, _make_groups(rank, size, store, backends))
        pipe.send((True, None))
        while True:
            try:
                fn, kwargs = pipe.recv()
            except EOFError:
                break
            pipe.send((True, fn(context, **kwargs)))
        context.state.clear()
        if dist.is_initialized():
            dist.destroy_process_group()
    except Exception:
        with contextlib.suppress(OSError):  # the caller has gone: nobody wants to know
            pipe.send((False, traceback.format_exc()))


def _make_groups(rank: int, size: int, store: str, backends: Sequence[str]) -> dict[str, Any]:
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers "fake")

    import farandole  # noqa: F401  (registers "farandole")

    groups: dict[str, Any] = {}
    timeout = datetime.timedelta(seconds=120)
    for backend in backends:
        if groups:
            groups[backend] = dist.new_group(backend=backend, timeout=timeout)
        else:
            dist.init_process_group(
                backend, store=dist.FileStore(store, size), rank=rank, world_size=size, timeout=timeout
            )
            groups[backend] = dist.group.WORLD
    return groups
