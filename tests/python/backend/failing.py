"""Ranks that are killed, from outside and in the middle of what they do, and what the others hear of it."""

from __future__ import annotations

import mmap
import os
import pathlib
import random
import signal
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

from backend.actions import action_of
from support.processes import await_all, run_ranks

BOUND = 5  # seconds within which a survivor must hear


class Progress:
    """In a file: the victim's pid, and how often it has begun and ended an operation."""

    _FORMAT = struct.Struct("3q")

    def __init__(self, path: pathlib.Path) -> None:
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), self._FORMAT.size)

    @classmethod
    def create(cls, path: pathlib.Path) -> Progress:
        path.write_bytes(bytes(cls._FORMAT.size))
        return cls(path)

    def set(self, begun: int, ended: int) -> None:
        self._FORMAT.pack_into(self._map, 0, os.getpid(), begun, ended)

    def get(self) -> tuple[int, int, int]:
        pid, begun, ended = self._FORMAT.unpack_from(self._map, 0)
        return pid, begun, ended


class Killer(threading.Thread):
    """In the process of the test: waits until the victim has begun, and ``delay`` seconds more, and kills it."""

    def __init__(self, path: pathlib.Path, delay: float) -> None:
        super().__init__()
        self._progress = Progress.create(path)
        self._delay = delay
        self._over = threading.Event()
        self.killed_at = 0.0

    def run(self) -> None:
        while self._progress.get()[0] == 0:
            if self._over.wait(0.001):
                return
        time.sleep(self._delay)
        self.killed_at = time.monotonic()
        os.kill(self._progress.get()[0], signal.SIGKILL)

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self.join()

    def __enter__(self) -> Killer:
        self.start()
        return self

    @property
    def was_inside(self) -> bool:
        """Whether the victim died inside an operation."""
        _, begun, ended = self._progress.get()
        return begun != ended


def act_until_killed(act: Callable[[], None], path: str) -> None:
    """What a victim does. It is gone in milliseconds, or the test has failed."""
    progress = Progress(pathlib.Path(path))
    deadline = time.monotonic() + 20
    for number in range(1 << 40):
        progress.set(number + 1, number)
        act()
        progress.set(number + 1, number + 1)
        assert time.monotonic() < deadline, "nobody killed the victim"


def survive(act: Callable[[], None], later: int = 2) -> tuple[float, list[str]]:
    """Acts until it fails, and then ``later`` times more; when the first failure came, and all errors."""
    failed_at = 0.0
    messages = []
    deadline = time.monotonic() + 20
    for _ in range(1 + later):
        with pytest.raises(dist.DistBackendError) as error:
            while time.monotonic() < deadline:
                act()
        failed_at = failed_at or time.monotonic()
        messages.append(str(error.value))
    return failed_at, messages


def _live(rank: int, world_size: int, action: str, victim: int, path: str) -> tuple[float, list[str]]:
    act = action_of(action, rank, world_size, victim)
    await_all(rank, world_size, "to the death")
    if rank == victim:
        act_until_killed(act, path)
    return survive(act)


@dataclass(frozen=True)
class Death:
    """How the victim died in ``action``, and what each survivor heard: how many seconds later, and its errors."""

    text: str
    was_inside: bool
    heard: dict[int, tuple[float, list[str]]]

    def check(self, name: str) -> None:
        """That all survivors were told in time that ``name``, say "rank 1 (host a, pid ", has died."""
        for rank, (seconds, messages) in self.heard.items():
            assert seconds < BOUND, f"{self.text}: rank {rank} heard after {seconds:.1f} s: {messages}"
            for message in messages:  # "is gone" when the control plane had not met it yet
                is_told = "its process died" in message or "its process is gone" in message
                assert name in message and is_told, f"{self.text}: rank {rank}: {message}"


def first_seed() -> int:
    """FARANDOLE_FAILURE_SEED draws the moments of another run."""
    return int(os.environ.get("FARANDOLE_FAILURE_SEED", random.randrange(1 << 30)))


def random_delay(seed: int) -> float:
    """0.3 ms to 0.2 s, as often below 8 ms as above: while ranks still connect, and in full flow."""
    return 10 ** random.Random(seed).uniform(-3.5, -0.7)


def die(action: str, world_size: int, victim: int, folder: pathlib.Path, seed: int, **options: Any) -> Death:
    """A group lives until ``victim`` is killed in ``action``, at a moment that is drawn from ``seed``.

    ``options`` are those of run_ranks.
    """
    delay = random_delay(seed)
    path = folder / f"progress{seed}"
    with Killer(path, delay) as killer:
        outcomes = run_ranks(
            _live, world_size, "farandole", may_die={victim}, action=action, victim=victim, path=str(path), **options
        )
    heard = {rank: (at - killer.killed_at, texts) for rank, (at, texts) in enumerate(o or (0, []) for o in outcomes)}
    assert outcomes[victim] is None
    del heard[victim]
    where = "inside an operation" if killer.was_inside else "between operations"
    times = ", ".join(f"rank {rank} {1e3 * seconds:.1f} ms" for rank, (seconds, _) in heard.items())
    text = f"seed {seed}: rank {victim} killed in {action} after {1e3 * delay:.1f} ms, {where}; told: {times}"
    print(text)
    return Death(text, killer.was_inside, heard)


def die_often(
    action: str, world_size: int, victim: int, folder: pathlib.Path, name: str, times: int = 3, **options: Any
) -> None:
    """Several such lives; ``name`` is how the survivors are to name the victim, say "rank 1 (host a, pid "."""
    seed = first_seed()
    deaths = [die(action, world_size, victim, folder, seed + i, **options) for i in range(times)]
    for death in deaths:
        death.check(name)
    assert any(death.was_inside for death in deaths), "never inside an operation"
