"""Collective calls that one rank may have made alone: what fails then says which call it was, and what all ranks do."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator

from torch.distributed import DistBackendError, DistError, DistNetworkError

_PATIENCE = 5.0  # seconds


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """An error of the collectives inside it begins with ``what``."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        # Others, as those of a device, may take more than a text.
        kind = (
            type(error) if type(error) in (ValueError, DistError, DistBackendError, DistNetworkError) else RuntimeError
        )
        raise kind(f"farandole.ddp: {what}. It failed: {error}") from error


@contextlib.contextmanager
def told_when_long(what: str) -> Iterator[None]:
    """As :func:`named`; who waits for more than five seconds warns, once, and waits on. It takes a thread."""
    notice = threading.Timer(_PATIENCE, _warn, (what,))
    notice.daemon = True
    notice.start()
    try:
        with named(what):
            yield
    finally:
        notice.cancel()


def _warn(what: str) -> None:
    warnings.warn(f"farandole.ddp: {what}. This rank has waited for {_PATIENCE:g} s; it waits on", stacklevel=1)
