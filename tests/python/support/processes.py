"""Runs a function on several ranks, each a real process with a bound on its time."""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import gc
import math
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from multiprocessing.connection import wait
from typing import Any

from support.devices import backend_for, entering, on_cpu, patience

# Children are forked from a server that has imported once what most of them use: a rank starts in milliseconds instead
# of seconds.
_context = multiprocessing.get_context("forkserver")
# torch._dynamo is what torch's DDP imports.
_context.set_forkserver_preload(
    [
        "torch",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.distributed.pipelining",
        "torch._dynamo",
        "numpy",
        "pytest",
        "farandole.ddp",
        "farandole.megatron",
        "farandole.pipelining",
        "farandole.sparse",
    ]
)


# Not by CUDA's MPS: there a process that is killed while the GPU works for it may take others with it.
NO_MPS = {"CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}


class RankFailed(RuntimeError):
    """A rank raised, died or ran out of time; the message holds its traceback."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    backend: str | None,
    timeout: float = 60,
    env: dict[str, str] | None = None,
    may_die: Collection[int] = (),
    enter: Callable[[int], None] | None = None,
    **kwargs: Any,
) -> list[Any]:
    """Runs ``fn(rank, world_size, **kwargs)`` on every rank and returns the results by rank.

    Args:
        fn: a module-level function; its result must pickle.
        world_size: number of processes.
        backend: given to ``init_process_group`` (with a FileStore), as `devices` has it; None initializes no group.
        timeout: seconds for all of it, on the CPU; then every process is killed and RankFailed raised. It is also that
            of the group, which infinity leaves at ten minutes.
        env: environment variables set in every rank before the group is made.
        may_die: ranks that are killed on purpose; their result is None.
        enter: called with the rank first of all in its process (Hosts.enter() gives one).
    """
    backend = None if backend is None else backend_for(backend)
    if may_die:
        env = NO_MPS | (env or {})
    timeout = patience(timeout)
    entered = entering(world_size, enter)
    with tempfile.TemporaryDirectory(prefix="farandole-test-") as folder:
        processes, pipes = [], []
        for rank in range(world_size):
            ours, theirs = _context.Pipe()
            store = os.path.join(folder, "store")
            args = (theirs, fn, rank, world_size, backend, store, timeout, env, entered, kwargs)
            process = _context.Process(target=_rank_main, args=args, daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            pipes.append(ours)
        stopped = set(may_die)
        try:
            results = _collect(processes, pipes, time.monotonic() + timeout, may_die)
        except RankFailed:
            raise
        except BaseException:  # pytest's time is over, say
            _show_where_they_are(processes)
            raise
        finally:
            for rank, process in enumerate(processes):
                process.join(timeout=2)
                if process.is_alive():
                    stopped.add(rank)
                    process.kill()
                    process.join()
        for rank, process in enumerate(processes):
            if process.exitcode != 0 and rank not in stopped:
                raise RankFailed(f"[rank {rank}] gave its result, then ended with exit code {process.exitcode}")
        return results


def await_all(rank: int, world_size: int, where: str = "to the end") -> None:
    """On every rank: returns when all have come this far, which the group has no part in. Who has met an error stays
    until the others have met theirs: leaving would be another one for them.
    """
    import torch.distributed

    store = torch.distributed.distributed_c10d._get_default_store()
    store.set(f"came {where} {rank}", "")
    store.wait([f"came {where} {other}" for other in range(world_size)])


def _collect(processes: list[Any], pipes: list[Any], deadline: float, may_die: Collection[int]) -> list[Any]:
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    while open_pipes:
        ready = wait(list(open_pipes), timeout=_seconds_until(deadline))
        if not ready:
            missing = sorted(open_pipes.values())
            _show_where_they_are([processes[rank] for rank in missing])
            failures[-1] = f"no result from ranks {missing} in time"
            break
        for pipe in ready:
            rank = open_pipes.pop(pipe)
            try:
                succeeded, value = pipe.recv()
            except EOFError:
                processes[rank].join(timeout=5)
                code = processes[rank].exitcode
                died = rank in may_die and code == -signal.SIGKILL
                succeeded, value = died, None if died else f"process ended with exit code {code}"
            (results if succeeded else failures)[rank] = value
            if not succeeded:  # the others may hang on this one: give them a moment, no more
                deadline = min(deadline, time.monotonic() + 10)
    if failures:
        raise RankFailed("\n".join(f"[rank {rank}] {text}" for rank, text in sorted(failures.items())))
    return [results[rank] for rank in range(len(processes))]


def _show_where_they_are(processes: list[Any]) -> None:
    """Those that have not ended write the stacks of their threads to stderr."""
    alive = [process for process in processes if process.is_alive()]
    for process in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
    if alive:
        time.sleep(0.5)


def _seconds_until(deadline: float) -> float | None:
    return None if math.isinf(deadline) else max(0.0, deadline - time.monotonic())


def _rank_main(pipe, fn, rank, world_size, backend, store_path, timeout, env, enter, kwargs) -> None:
    faulthandler.register(signal.SIGUSR1)
    gc.freeze()  # else the first full collection copies every page that this process shares with the server
    os.environ.update(env or {})
    import torch

    torch.set_num_threads(1)
    try:
        if enter is not None:
            enter(rank)
        if backend is not None:
            torch.distributed.init_process_group(
                backend,
                store=torch.distributed.FileStore(store_path, world_size),
                rank=rank,
                world_size=world_size,
                timeout=datetime.timedelta(seconds=600 if math.isinf(timeout) else timeout),
            )
        result = fn(rank, world_size, **kwargs)
        if backend is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        pipe.send((True, on_cpu(result)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
        pipe.close()
        os._exit(1)
