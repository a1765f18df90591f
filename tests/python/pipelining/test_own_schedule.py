"""The template of examples/own_schedule.py, as a user launches it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from farandole.pipelining import plan
from support.devices import only_on_cpu

pytestmark = only_on_cpu("an example whose stages are there")


EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "own_schedule.py"


def test_the_template_trains_and_its_losses_fall() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    result = subprocess.run(
        [*command, "--nproc-per-node", "2", str(EXAMPLE)], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    losses = [float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+)$", result.stdout, re.MULTILINE)]
    assert len(losses) == 5
    assert all(later < earlier for earlier, later in zip(losses, losses[1:], strict=False)), losses


def test_the_template_is_the_plan_that_it_says_it_is() -> None:
    spec = importlib.util.spec_from_file_location("own_schedule", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for stages in range(1, 6):
        for microbatches in range(1, 12):
            made = module.eager_1f1b(stages, microbatches)
            assert made == plan("1F1B", stages, microbatches, warmup_per_stage=2), (stages, microbatches)
            forwards = module.eager_1f1b(stages, microbatches, forward_only=True)
            assert forwards == plan("1F1B", stages, microbatches, forward_only=True), (stages, microbatches)
