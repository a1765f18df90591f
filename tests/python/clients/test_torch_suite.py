"""torch's own tests of a CPU backend pass over farandole, but for those that ask for another backend's words."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
LIMIT = 300  # seconds for all of them

# What may fail, and why. A test that passes against this list fails here: the list is kept true.
OTHER_WORDS = {
    "test_get_backend": "'farandole' != 'gloo'",
    # Who waits is told which rank is missing, not that rank 0 met an error.
    "test_monitored_barrier_gloo": "says rank 0",
    # A rank that has left is told of at once, not after a timeout.
    "test_monitored_barrier_gloo_rank_0_timeout": "its process has left",
}
# Up to torch 2.12 a monitored barrier of Python's asks for gloo by its name.
TORCHS_REFUSAL = "monitored_barrier is only implemented for GLOO backend"


@pytest.mark.parametrize(("stands_in_for", "world_size", "at_least"), [("gloo", 4, 80), ("mpi", 3, 12)])
def test_torchs_own_tests_of_a_backend(stands_in_for, world_size, at_least, tmp_path):
    results = tmp_path / "results.json"
    env = {
        **os.environ,
        "BACKEND": stands_in_for,
        "WORLD_SIZE": str(world_size),
        "TEMP_DIR": str(tmp_path),
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": "60",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "clients.torch_suite", str(results)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes = json.loads(results.read_text())
    failed = {name: why for name, (outcome, why) in outcomes.items() if outcome == "failed"}
    unexpected = {
        name: why
        for name, why in failed.items()
        if TORCHS_REFUSAL not in why and (name not in OTHER_WORDS or OTHER_WORDS[name] not in why)
    }
    assert not unexpected, "\n\n".join(f"{name}: {why[-3000:]}" for name, why in unexpected.items())
    passed = [name for name, (outcome, _) in outcomes.items() if outcome == "passed"]
    assert not OTHER_WORDS.keys() & set(passed), "the list is out of date"
    assert len(passed) >= at_least, outcomes
