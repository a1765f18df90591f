"""torchrec, which is optional: whether it loads, and if not, what was found and what would fit.

Nothing here imports torchrec before it is asked to.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["require_torchrec", "torchrec_reason"]

# The versions that belong together, as the extras in pyproject.toml have them.
TORCH = "2.11"
TORCHREC = "1.6.1"
FBGEMM = "1.6.0"

_ADVICE = (
    f"torch {TORCH}.* with torchrec {TORCHREC} and fbgemm-gpu-cpu {FBGEMM} would fit (on machines with a GPU "
    f"fbgemm-gpu {FBGEMM}; one of the two, as both are the package fbgemm_gpu)"
)


def require_torchrec() -> None:
    """Imports torchrec; an ImportError says what is missing, what was found and which versions fit."""
    reason = torchrec_reason()
    if reason is not None:
        raise ImportError(f"farandole.sparse needs torchrec: {reason}") from _failure()


def torchrec_reason() -> str | None:
    """Why torchrec cannot be used here, in one line; None when it can. The first call imports it, which takes seconds."""
    error = _failure()
    if error is None:
        return None
    versions = [("torch", torch.__version__)] + [(name, _version(name)) for name in ("torchrec", *_fbgemms())]
    found = ", ".join(f"{name} {version}" if version else f"no {name}" for name, version in versions)
    return f"found {found}; {_why(error)}; {_ADVICE}"


@functools.cache
def _failure() -> Exception | None:
    """Of the import, which is tried once: half of it may have been done, and registered operators, before it failed."""
    try:
        with _without_table():
            importlib.import_module("fbgemm_gpu")
            importlib.import_module("torchrec")
    except Exception as error:  # by a library that does not load: OSError, AttributeError, RuntimeError, ...
        return error
    return None


@contextmanager
def _without_table() -> Iterator[None]:
    """Without fbgemm's warnings that its table of versions of torch does not list itself, one for each library.

    It gives them to the root logger by functions that give it a handler, too, which would be no one's choice.
    """

    def other(record: logging.LogRecord) -> bool:
        return "_fbgemm_torch_compat_table" not in record.getMessage()

    root = logging.getLogger()
    handlers = root.handlers[:]
    root.addFilter(other)
    try:
        yield
    finally:
        root.removeFilter(other)
        root.handlers[:] = handlers


def _fbgemms() -> list[str]:
    """The builds of fbgemm that are installed; more than one have overwritten each other."""
    return [name for name in ("fbgemm-gpu-cpu", "fbgemm-gpu") if _version(name)] or ["fbgemm-gpu-cpu"]


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _why(error: Exception) -> str:
    """The error and what it came from, each by its first line."""
    parts: list[str] = []
    cause: BaseException | None = error
    while cause is not None:
        text = " ".join(str(cause).strip().splitlines()[:1])
        parts.append(f"{type(cause).__name__}: {text}")
        cause = cause.__cause__
    return ", from ".join(parts)
