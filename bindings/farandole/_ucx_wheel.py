"""Finds UCX where its wheel is not beside this package."""

import ctypes
import importlib.util
from pathlib import Path

_LIBRARIES = ("libucs.so.0", "libucp.so.0")  # those that the extension names
_BESIDE = Path(__file__).parent.parent / "libucx"  # where the extension looks


def load() -> None:
    """Loads the wheel's libraries, for the extension to find them loaded: a virtual environment that sees the system's
    packages may have farandole of its own and UCX of the system. Does nothing where no wheel is."""
    if _BESIDE.exists():
        return
    wheel = importlib.util.find_spec("libucx")
    if wheel is None or wheel.origin is None:
        return
    for library in _LIBRARIES:
        ctypes.CDLL(str(Path(wheel.origin).parent / "lib" / library), ctypes.RTLD_LOCAL)
