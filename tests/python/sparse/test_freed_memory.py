"""What the steps of a pipeline free stays with the process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from support.sanitizers import SANITIZED

STEPS = """
import resource, sys
import torch
from farandole.sparse import TrainPipelineSparseDist

if sys.argv[1] == "pipeline":
    model = torch.nn.Linear(1, 1)
    TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters()), "cpu")


def step():
    gradients = [torch.zeros(640_000) for _ in range(int(sys.argv[2]))]  # 2.5 MB each


for _ in range(5):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / 20)
"""


def faults(mode: str, gradients: int) -> float:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", STEPS, mode, str(gradients)],
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return float(done.stdout)


@pytest.mark.skipif(SANITIZED, reason="the sanitizers have a malloc of their own")
def test_memory_of_gradients_is_not_faulted_in_again_by_each_step():
    counts = (3, 4, 6, 12, 20)
    assert max(faults("plain", count) for count in counts) > 100  # by what lies behind them in the heap
    assert max(faults("pipeline", count) for count in counts) < 20
