"""torch's own tests of its backends, which its wheel carries, over farandole: those of a CPU, in real processes.

``python -m clients.torch_suite RESULTS`` runs those that torch keeps for the backend that BACKEND names (gloo; mpi for
exchanges of all with all, which gloo has not) on WORLD_SIZE ranks, and writes what became of each. It is a program of
its own: torch's module reads both when it is imported.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import sys
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.testing._internal.distributed import distributed_test

import farandole  # noqa: F401  registers the backend

# Trained over every backend by test_clients.py; here they would take most of the time.
LEFT_OUT = ("ddp", "DistributedDataParallel", "SyncBatchNorm", "model_averaging", "post_localSGD", "hierarchical")


def _over_farandole(make_group: Callable[..., Any]) -> Callable[..., Any]:
    """``make_group`` for which the backend that torch's tests name is farandole."""

    @functools.wraps(make_group)
    def make(*args: Any, **kwargs: Any) -> Any:
        if str(kwargs.get("backend")).lower() == os.environ["BACKEND"]:
            kwargs["backend"] = "farandole"
        return make_group(*args, **kwargs)

    return make


class TorchSuite(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):
    """Each test forks its ranks from this process, which has imported everything and uses no group."""

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(multiprocessing.get_context("fork").Process)


class Results(unittest.TestResult):
    """What became of each test: "passed", or why it was skipped or failed."""

    def __init__(self) -> None:
        super().__init__()
        self.outcomes: dict[str, tuple[str, str]] = {}

    def _note(self, test: Any, outcome: str, why: str = "") -> None:
        self.outcomes[test._testMethodName] = (outcome, why)

    def addSuccess(self, test: Any) -> None:  # noqa: N802  unittest's name
        self._note(test, "passed")

    def addSkip(self, test: Any, reason: str) -> None:  # noqa: N802
        self._note(test, "skipped", reason)

    def addFailure(self, test: Any, err: Any) -> None:  # noqa: N802
        self._note(test, "failed", self._exc_info_to_string(err, test))

    addError = addFailure  # noqa: N815


def main() -> None:
    for module in (dist, dist.distributed_c10d):
        module.init_process_group = _over_farandole(module.init_process_group)
        module.new_group = _over_farandole(module.new_group)
    names = unittest.defaultTestLoader.getTestCaseNames(TorchSuite)
    if os.environ["BACKEND"] == "mpi":
        names = [name for name in names if "all_to_all" in name]
    results = Results()
    for name in names:
        if not any(part in name for part in LEFT_OUT):
            TorchSuite(name).run(results)
    Path(sys.argv[1]).write_text(json.dumps(results.outcomes))


if __name__ == "__main__":
    main()
