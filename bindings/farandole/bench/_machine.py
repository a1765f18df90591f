"""The facts about a machine without which its figures say nothing."""

from __future__ import annotations

import ctypes
import os
import platform
from pathlib import Path
from typing import Any

import torch

import farandole


def facts() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory / 2**30, 1),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ucx": _ucx_version(),
        "farandole": farandole.__version__,
    }


def load() -> float:
    """Processes that ran or waited for a core, averaged over the last minute."""
    return os.getloadavg()[0]


def _ucx_version() -> str:
    version = ctypes.CDLL("libucp.so.0").ucp_get_version_string  # the one that farandole has loaded
    version.restype = ctypes.c_char_p
    return version().decode().strip().rstrip(",")


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
