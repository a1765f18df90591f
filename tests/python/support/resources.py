"""What a process holds of the system: descriptors by what they are, threads by name, memory that is mapped."""

from __future__ import annotations

import os
import pathlib
from collections import Counter


def resident_bytes() -> int:
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def private_bytes() -> int:
    """What is resident and nobody else's: without files and shared memory."""
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def _descriptors() -> list[str]:
    kinds = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:  # the one that lists them
            continue
        kinds.append("descriptor " + target.partition(":[")[0])
    return kinds


def _threads() -> list[str]:
    names = []
    for task in pathlib.Path("/proc/self/task").iterdir():
        try:
            names.append("thread " + (task / "comm").read_text().strip())
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
    return names


def _shared_maps() -> list[str]:
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    return ["map " + line.split(maxsplit=5)[5] for line in lines if "s" in line.split()[1]]


def resources() -> Counter[str]:
    """How many there are of each kind, say {"descriptor socket": 2, "thread python": 1, "map /memfd:ring (deleted)": 4}."""
    return Counter(_descriptors() + _threads() + _shared_maps())
