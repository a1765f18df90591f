"""Two long-lived ranks, each a process with every peer's group, so that the peers share one noise."""

from __future__ import annotations

import contextlib
import datetime
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

RANKS = 2
_START_SECONDS = 120.0
# Children are forked from a server that has imported torch once: they start in no time, and clean.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch.distributed", "farandole"])


@dataclass
class Rank:
    """What a function that runs on a rank gets."""

    rank: int
    groups: dict[str, Any]  # by peer: farandole, gloo, fake
    state: dict[Any, Any] = field(default_factory=dict)  # lives from call to call

    @property
    def peer(self) -> int:
        return 1 - self.rank


class RankPair:
    """Runs functions of this package on both ranks at once. Use as a context manager.

    Thread: the one that made it. The processes end with it, whatever they do.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="farandole-bench-")
        store = str(Path(self._folder.name) / "store")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(RANKS):
            ours, theirs = _context.Pipe()
            process = _context.Process(target=_serve, args=(theirs, rank, store), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> RankPair:
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
        """``fn(rank, **kwargs)`` on both ranks; the results by rank.

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
        waiting = dict(zip(self._pipes, range(RANKS), strict=True))
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
        return [results[rank] for rank in range(RANKS)]


def transport(rank: Rank) -> str:
    """Runs on a rank: what carries farandole's messages to the other one."""
    import farandole

    return farandole.transport_report()[rank.peer]


def _serve(pipe: Connection, rank: int, store: str) -> None:
    import torch.distributed as dist

    try:
        context = Rank(rank, _make_groups(rank, store))
        pipe.send((True, None))
        while True:
            try:
                fn, kwargs = pipe.recv()
            except EOFError:
                break
            pipe.send((True, fn(context, **kwargs)))
        context.state.clear()
        dist.destroy_process_group()
    except Exception:
        with contextlib.suppress(OSError):  # the caller has gone: nobody wants to know
            pipe.send((False, traceback.format_exc()))


def _make_groups(rank: int, store: str) -> dict[str, Any]:
    import torch
    import torch.distributed as dist
    import torch.testing._internal.distributed.fake_pg  # registers "fake"

    import farandole  # noqa: F401  (registers "farandole")

    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=120)
    dist.init_process_group(
        "farandole", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=timeout
    )
    groups: dict[str, Any] = {"farandole": dist.group.WORLD}
    for backend in ("gloo", "fake"):
        groups[backend] = dist.new_group(backend=backend, timeout=timeout)
    return groups
