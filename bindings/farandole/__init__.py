"""farandole: pipelines, data parallelism and their point-to-point traffic for torch.distributed."""

import os

# UCX installs signal handlers when its library is loaded; the process belongs to its user.
os.environ.setdefault("UCX_ERROR_SIGNALS", "")
os.environ.setdefault("UCX_DEBUG_SIGNO", "0")

import torch  # noqa: E402, F401  (loads the libraries that _C links)

from farandole import _C  # noqa: E402

__all__ = ["_C"]
