"""The flight recorder as Python sees it, and who records: farandole or torch, never both."""

from __future__ import annotations

import os
import pickle
from typing import Any

import torch.distributed.distributed_c10d as c10d

from farandole import _C


def settle_who_records() -> None:
    """Has torch attach its recorder to farandole's groups where ``FARANDOLE_FLIGHT_RECORDER`` says so, and only there.

    torch attaches one (from 2.15 on) to every group whose backend is not in a set of its own, which it looks into
    after the backend was made. Where there is no such set, torch attaches nothing.
    """
    keeper = _C.flight_recorder_keeper()
    backends = getattr(c10d, "_FR_SELF_RECORDING_BACKENDS", None)
    if not isinstance(backends, set):
        return
    if keeper == "torch":
        backends.discard("farandole")
    else:
        backends.add("farandole")


def flight_recorder() -> dict[str, Any]:
    """What this process's groups have done last, as ``torch.distributed.flight_recorder`` reads it.

    ``entries`` has a dict for each of the latest operations (2000, or ``TORCH_FR_BUFFER_SIZE``), oldest first: at most
    two tensors on each side (``num_inputs`` and ``num_outputs`` are there where it had more) and five dimensions of
    each, the last of which is then the product of the rest. One that failed is retired, not completed, and has an
    ``error``. Empty where nothing is recorded.
    """
    snapshot: dict[str, Any] = pickle.loads(_C.flight_recorder_pickle())
    return snapshot


def dump_flight_recorder(path: str | os.PathLike[str] | None = None) -> str:
    """Writes the same to a file for ``torchfrtrace``, and returns its path.

    Args:
        path: None is where a failure's dump goes: ``TORCH_FR_DUMP_TEMP_FILE`` followed by this process's rank, or
            what torch uses where that is not set.

    Raises:
        RuntimeError: nothing is recorded, there was no group yet whose rank names the file, or the file cannot be
            written.
    """
    return _C.dump_flight_recorder("" if path is None else os.fspath(path))
