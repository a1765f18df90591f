"""A backend that moves nothing, of the C++ benchmarks: what goes through it costs what c10d itself costs.

torch's "fake" backend moves data within the rank in most collectives.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

if TYPE_CHECKING:
    from farandole.bench._ranks import Rank

NOOP = "no-op"
_NAME = "noop_backend"
HOW_TO_GET_IT = "it comes with the build with FARANDOLE_BENCHMARKS=ON, in --programs"


def is_built(programs: Path) -> bool:
    return _file(programs).exists()


def add_group(rank: Rank, programs: Path) -> None:
    """Runs on all ranks: ``rank.groups`` has a group of it."""
    spec = importlib.util.spec_from_file_location(_NAME, _file(programs))
    assert spec is not None and spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    dist.Backend.register_backend("noop", lambda store, rank, size, timeout: module.create(rank, size), devices=["cpu"])
    # torch's recorder would be half of what it costs; farandole's groups have one of their own.
    self_recording: set[str] = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    self_recording.add("noop")
    rank.groups[NOOP] = dist.new_group(backend="noop")


def _file(programs: Path) -> Path:
    return programs / f"{_NAME}.so"
