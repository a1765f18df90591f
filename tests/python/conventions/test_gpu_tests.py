""".ci/gpu_tests.py, as far as it can be seen without a GPU: which files run how, what is told of them, and for how long
CUDA's MPS runs beside them."""

import os
import pathlib
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from typing import Any

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]

FILES = {
    "test_well.py": "import os\ndef test_device():\n    assert os.environ['FARANDOLE_TEST_DEVICE'] == 'cuda'\n",
    "deep/test_too.py": "def test_a():\n    pass\ndef test_b():\n    pass\n",
    "deep/no_test.py": "raise ValueError\n",
}
# Stands for the control program of MPS: notes what it is asked, and of whom.
CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then echo "begin" >> "{log}"; else read line; echo "$line" >> "{log}"; fi
test -d "$CUDA_MPS_PIPE_DIRECTORY" || echo "no folder" >> "{log}"
"""


def write(folder: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run(tmp_path: pathlib.Path, *arguments: str, limit: int = 0, **environment: str) -> Any:
    command = [sys.executable, ".ci/gpu_tests.py", "--jobs", "2", "--limit", str(limit), str(tmp_path / "reports")]
    command += [*arguments, "-p", "no:cacheprovider"]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_each_file_has_a_report_and_a_line(tmp_path):
    folder = write(tmp_path / "tests", FILES)
    shown = run(tmp_path, str(folder))
    assert shown.returncode == 0, shown.stdout
    reports = [ElementTree.parse(file) for file in (tmp_path / "reports" / "pytest-on-gpus").glob("*.xml")]
    assert sorted(len(list(report.iter("testcase"))) for report in reports) == [1, 2]
    assert "test_well.py: 1 passed" in shown.stdout and "test_too.py: 2 passed" in shown.stdout


def test_a_file_that_fails_is_shown_and_options_choose_tests(tmp_path):
    write(tmp_path / "tests", FILES | {"test_bad.py": "def test_b():\n    assert 1 == 2, 'as it must'\n"})
    shown = run(tmp_path, str(tmp_path / "tests"), "-k", "test_b")
    assert shown.returncode == 1
    assert "as it must" in shown.stdout and "test_too.py: 1 passed, 1 deselected" in shown.stdout
    chosen = run(tmp_path, f"{tmp_path}/tests/deep/test_too.py::test_a")
    assert chosen.returncode == 0 and "test_too.py::test_a: 1 passed" in chosen.stdout
    assert len(chosen.stdout.splitlines()) == 1


def test_tests_of_gpus_run_as_they_are(tmp_path):
    shown = run(tmp_path, "tests/python/gpu/test_movement.py", "--collect-only", "-q")
    assert shown.returncode == 0, shown.stdout
    assert [folder.name for folder in (tmp_path / "reports").iterdir()] == ["pytest"]


def test_no_test_begins_when_the_time_is_over(tmp_path):
    slow = "import pytest, time\n@pytest.mark.parametrize('i', range(3))\ndef test_it(i):\n    time.sleep(2)\n"
    write(tmp_path / "tests", {f"test_{name}.py": slow for name in "abcd"})
    began = time.monotonic()
    shown = run(tmp_path, str(tmp_path / "tests"), limit=3)
    assert time.monotonic() - began < 30
    assert shown.returncode == 0 and shown.stdout.count("until the time was over") == 2, shown.stdout
    assert "no time is left for" in shown.stdout and "test_d.py" in shown.stdout


def test_nothing_is_left_where_it_is_ended(tmp_path):
    pid = tmp_path / "pid"
    write(
        tmp_path / "tests",
        {
            "test_it.py": f"import os, time\ndef test_it():\n    open({str(pid)!r}, 'w').write(str(os.getpid()))\n    time.sleep(60)\n"
        },
    )
    command = [sys.executable, ".ci/gpu_tests.py", str(tmp_path / "reports"), str(tmp_path / "tests")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as running:
        deadline = time.monotonic() + 60
        while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        running.terminate()
        assert running.wait(timeout=30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_mps_runs_as_long_as_the_tests_where_nobody_has_one(tmp_path):
    log, folder = tmp_path / "log", write(tmp_path / "tests", FILES)
    write(tmp_path / "bin", {"nvidia-cuda-mps-control": CONTROL.format(log=log)})
    (tmp_path / "bin" / "nvidia-cuda-mps-control").chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    # torch has no GPU here: its trial fails, and tests run without.
    shown = run(tmp_path, str(folder), PATH=path, CUDA_VISIBLE_DEVICES="")
    assert shown.returncode == 0 and "MPS is there and does not work" in shown.stdout, shown.stdout
    assert log.read_text().splitlines() == ["begin", "quit -t 5"]
    log.unlink()
    run(tmp_path, str(folder), PATH=path, CUDA_MPS_PIPE_DIRECTORY="/tmp/of-others")
    assert not log.exists()
