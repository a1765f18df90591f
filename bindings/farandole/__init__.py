"""farandole: pipelines, data parallelism and their point-to-point traffic for torch.distributed."""

import os

# UCX installs signal handlers when its library is loaded; the process belongs to its user.
os.environ.setdefault("UCX_ERROR_SIGNALS", "")
os.environ.setdefault("UCX_DEBUG_SIGNO", "0")
os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")

import torch

import farandole_autoload
from farandole import _build, _ucx_wheel

_build.check(torch.__version__)
_ucx_wheel.load()

from farandole import _C  # noqa: E402
from farandole._backend import algorithms, batch_p2p, connect_edges, create_backend, transport_report  # noqa: E402
from farandole._flight_recorder import dump_flight_recorder, flight_recorder  # noqa: E402

__version__ = "0.1.0"
__all__ = [
    "_C",
    "algorithms",
    "batch_p2p",
    "connect_edges",
    "create_backend",
    "dump_flight_recorder",
    "flight_recorder",
    "transport_report",
]

farandole_autoload.register()
