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
# Stands for the control program of MPS: notes what it is asked.
CONTROL = """#!/bin/sh
if [ "$1" = -d ]; then asked=begin; else read asked; fi
echo "$asked" >> "{log}"
if [ "$asked" = get_server_list ]; then echo "$FAKE_SERVERS"; fi
test -d "$CUDA_MPS_PIPE_DIRECTORY" || echo "no folder" >> "{log}"
"""
# Stands for torch on a GPU.
TORCH = "class ones:\n    def __init__(self, *_, **__): pass\n    def item(self): return 1.0\n"


def write(folder: pathlib.Path, files: dict[str, str]) -> pathlib.Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def command_for(tmp_path: pathlib.Path, *arguments: str, limit: int = 0) -> list[str]:
    command = [sys.executable, ".ci/gpu_tests.py", "--jobs", "2", "--limit", str(limit), str(tmp_path / "reports")]
    return [*command, *arguments, "-p", "no:cacheprovider"]


def run(tmp_path: pathlib.Path, *arguments: str, limit: int = 0, **environment: str) -> Any:
    return subprocess.run(
        command_for(tmp_path, *arguments, limit=limit),
        cwd=ROOT,
        env=os.environ | {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/of-others"} | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def reports_of(tmp_path: pathlib.Path) -> list[Any]:
    return [ElementTree.parse(file) for file in (tmp_path / "reports" / "pytest-on-gpus").glob("*.xml")]


def test_each_file_has_a_report_and_a_line(tmp_path):
    folder = write(tmp_path / "tests", FILES)
    shown = run(tmp_path, str(folder), str(folder / "test_well.py"))  # named twice, run once
    assert shown.returncode == 0, shown.stdout
    assert sorted(len(list(report.iter("testcase"))) for report in reports_of(tmp_path)) == [1, 2]
    assert "test_well.py: 1 passed" in shown.stdout and "test_too.py: 2 passed" in shown.stdout


def test_a_file_that_fails_is_shown_and_options_choose_tests(tmp_path):
    write(tmp_path / "tests", FILES | {"test_bad.py": "def test_b():\n    assert 1 == 2, 'as it must'\n"})
    shown = run(tmp_path, str(tmp_path / "tests"), "-k", "test_b")
    assert shown.returncode == 1
    assert "as it must" in shown.stdout and "test_too.py: 1 passed, 1 deselected" in shown.stdout
    chosen = run(tmp_path, f"{tmp_path}/tests/deep/test_too.py::test_a")
    assert chosen.returncode == 0 and "test_too.py::test_a: 1 passed" in chosen.stdout
    assert len(chosen.stdout.splitlines()) == 2  # and that of MPS
    # What is there as a path, too, is an option's value.
    shown = run(tmp_path, str(tmp_path / "tests" / "deep"), "-k", "tests")
    assert "test_too.py: 2 deselected" in shown.stdout and len(shown.stdout.splitlines()) == 2
    wrong = run(tmp_path, "tests/no_such")
    assert wrong.returncode == 1 and "there is no tests/no_such" in wrong.stderr
    late = run(tmp_path, "-k", "device", f"{tmp_path}/tests/test_well.py")
    assert late.returncode == 1 and "tests/test_well.py is behind options" in late.stderr


def test_a_file_without_a_report_gets_one(tmp_path):
    ends = "import os, signal\ndef test_it():\n    os.kill(os.getpid(), signal.SIGSEGV)\n"
    shown = run(tmp_path, str(write(tmp_path / "tests", {"test_it.py": ends})))
    assert shown.returncode == 1 and "ended with status -11" in shown.stdout
    [report] = reports_of(tmp_path)
    [error] = report.iter("error")
    assert error.get("message").startswith("ended with status -11")


def test_a_file_without_tests_is_an_error_unless_options_have_chosen_none(tmp_path):
    folder = write(tmp_path / "tests", {"test_none.py": ""})
    command = command_for(tmp_path, str(folder))[:-2]
    environment = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/of-others"}
    assert subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=60).returncode == 1
    assert run(tmp_path, str(folder), "-k", "other").returncode == 0


def test_tests_of_gpus_run_as_they_are(tmp_path):
    shown = run(tmp_path, "tests/python/gpu/test_movement.py", "--collect-only", "-q")
    assert shown.returncode == 0, shown.stdout
    assert [one.name for one in (tmp_path / "reports").iterdir() if one.is_dir()] == ["pytest"]


def test_no_test_begins_when_the_time_is_over(tmp_path):
    slow = "import pytest, time\n@pytest.mark.parametrize('i', range(3))\ndef test_it(i):\n    time.sleep(2)\n"
    write(tmp_path / "tests", {f"test_{name}.py": slow for name in "abcd"})
    began = time.monotonic()
    shown = run(tmp_path, str(tmp_path / "tests"), limit=3)
    assert time.monotonic() - began < 30
    assert shown.returncode == 0 and shown.stdout.count("until the time was over") == 2, shown.stdout
    assert "no time is left for" in shown.stdout and "test_d.py" in shown.stdout


def test_what_measures_times_runs_alone_and_last(tmp_path):
    log = tmp_path / "log"
    noting = f"import time\ndef test_it():\n    for what in 'be', 'end':\n        open({str(log)!r}, 'a').write(__name__ + what + '\\n')\n        time.sleep(1)\n"
    write(tmp_path / "tests", {f"test_{name}.py": noting for name in ("overlap", "streams", "x", "y")})
    assert run(tmp_path, str(tmp_path / "tests")).returncode == 0
    said = log.read_text().splitlines()
    assert {line[5] for line in said[:4]} == {"x", "y"}
    assert [line.removeprefix("test_") for line in said[4:]] in (
        ["overlapbe", "overlapend", "streamsbe", "streamsend"],
        ["streamsbe", "streamsend", "overlapbe", "overlapend"],
    )


def test_nothing_is_left_where_it_is_ended(tmp_path):
    pid = tmp_path / "pid"
    waits = (
        f"import os, time\ndef test_it():\n    open({str(pid)!r}, 'w').write(str(os.getpid()))\n    time.sleep(60)\n"
    )
    folder = write(tmp_path / "tests", {"test_it.py": waits})
    environment = os.environ | {"CUDA_MPS_PIPE_DIRECTORY": "/tmp/of-others"}
    with subprocess.Popen(
        command_for(tmp_path, str(folder)), cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
    ) as running:
        deadline = time.monotonic() + 60
        while not (pid.exists() and pid.read_text()) and time.monotonic() < deadline:
            time.sleep(0.05)
        running.terminate()
        assert running.wait(timeout=30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def run_with_mps(tmp_path: pathlib.Path, tests: dict[str, str], **environment: str) -> Any:
    """CUDA's MPS is a stand-in, which notes in ``log`` what it is asked."""
    control = tmp_path / "bin" / "nvidia-cuda-mps-control"
    write(
        tmp_path,
        tests | {"fake/torch.py": TORCH, f"bin/{control.name}": CONTROL.format(log=tmp_path / "log")},
    )
    control.chmod(0o755)
    return subprocess.run(
        command_for(tmp_path, str(tmp_path / "tests")),
        cwd=ROOT,
        env=os.environ
        | {"PATH": f"{control.parent}:{os.environ['PATH']}", "PYTHONPATH": str(tmp_path / "fake")}
        | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


without_others = pytest.mark.skipif(pathlib.Path("/tmp/nvidia-mps").exists(), reason="there is an MPS of others")


@without_others
@pytest.mark.parametrize("servers", ["618", ""])
def test_mps_runs_as_long_as_the_tests_where_nobody_has_one(tmp_path, servers, monkeypatch):
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    log = tmp_path / "log"
    noting = f"import os\ndef test_it():\n    open({str(log)!r}, 'a').write(os.environ.get({'CUDA_MPS_PIPE_DIRECTORY'!r}, 'none') + '\\n')\n"
    shown = run_with_mps(tmp_path, {"tests/test_it.py": noting}, FAKE_SERVERS=servers)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    begin, asked, pipe, end = log.read_text().splitlines()
    assert (begin, asked, end) == ("begin", "get_server_list", "quit -t 5")
    assert ("farandole-mps-" in pipe) == bool(servers) and ("side by side" in shown.stdout) == bool(servers)
    assert not pathlib.Path(pipe).exists()
    log.unlink()
    shown = run_with_mps(tmp_path, {}, CUDA_MPS_PIPE_DIRECTORY="/tmp/of-others")
    assert shown.returncode == 0 and "MPS of others" in shown.stdout
    assert log.read_text() == "/tmp/of-others\n"


@without_others
@pytest.mark.parametrize("is_to_blame", [False, True])
def test_what_lost_the_gpu_to_another_process_runs_again_without_mps(tmp_path, is_to_blame, monkeypatch):
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    loses = (
        "import os\ndef test_it():\n    assert 'CUDA_MPS_PIPE_DIRECTORY' not in os.environ, 'an illegal memory access'\n"
        f"    assert not {is_to_blame}, 'an illegal memory access'\n"
    )
    shown = run_with_mps(
        tmp_path, {"tests/test_loses.py": loses, "tests/test_else.py": "def test_it():\n    pass\n"}, FAKE_SERVERS="1"
    )
    assert shown.returncode == int(is_to_blame), shown.stdout
    assert "test_loses.py: another process took the GPU from it: it runs again" in shown.stdout
    assert f"test_loses.py: 1 {'failed' if is_to_blame else 'passed'}" in shown.stdout
    assert sum(len(list(report.iter("failure"))) for report in reports_of(tmp_path)) == int(is_to_blame)
    assert len(reports_of(tmp_path)) == 2
