"""Asks for torchrec in another process. Apart from the tests: importing this imports no torchrec."""

import contextlib
import importlib
import io
import logging
import pathlib
import sys
from typing import Any


def asked(rank: int, world_size: int, folder: pathlib.Path) -> dict[str, Any]:
    """What a process is told that looks for modules in `folder` first."""
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    from farandole.sparse._requirements import require_torchrec, torchrec_reason

    told: dict[str, Any] = {"before": [name for name in ("torchrec", "fbgemm_gpu") if name in sys.modules]}
    with contextlib.redirect_stderr(io.StringIO()) as stderr:
        told["reasons"] = [torchrec_reason(), torchrec_reason()]
        told["logging"] = (logging.root.handlers, logging.root.filters)
        try:
            require_torchrec()
        except ImportError as error:
            told |= {"error": str(error), "cause": repr(error.__cause__)}
    told["stderr"] = stderr.getvalue()
    return told
