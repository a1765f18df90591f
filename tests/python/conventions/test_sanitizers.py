"""A report of a sanitizer, from any process, makes a test fail."""

import ctypes
import os
import pathlib
import subprocess
import sys

import pytest

from support.processes import RankFailed, run_ranks
from support.sanitizers import FOLDER, SANITIZED

HERE = pathlib.Path(__file__).parent

TESTS = """
import os, pathlib

def test_without():
    pass

def test_with():
    pathlib.Path(os.environ["{folder}"], "sanitizer.2").write_text("heap-use-after-free")

def test_after():
    pass
"""


def test_only_the_test_in_which_a_report_appears_fails_and_shows_it(tmp_path):
    (tmp_path / "sanitizer.1").write_text("an earlier one")
    (tmp_path / "test_reports.py").write_text(TESTS.format(folder=FOLDER))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "support.sanitizers", "-c", "/dev/null", "-rA", "test_reports.py"],
        cwd=tmp_path,
        env=os.environ | {FOLDER: str(tmp_path), "PYTHONPATH": str(HERE.parent)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stdout
    assert "3 passed, 1 error" in done.stdout and "ERROR at teardown of test_with " in done.stdout, done.stdout
    assert "heap-use-after-free" in done.stdout and "an earlier one" not in done.stdout, done.stdout


def _write_to_freed_memory(rank, world_size):
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    memory = ctypes.c_void_p(libc.malloc(ctypes.c_size_t(64)))
    libc.free(memory)
    libc.memset(memory, 0, ctypes.c_size_t(64))


@pytest.mark.skipif(not SANITIZED, reason="needs a build with sanitizers: ./dev test --preset asan-torch")
def test_what_a_rank_does_to_freed_memory_is_reported():
    with pytest.raises(RankFailed, match="exit code 86"):
        run_ranks(_write_to_freed_memory, 1, None)
    reports = [path for path in pathlib.Path(os.environ[FOLDER]).glob("sanitizer.*") if "memset" in path.read_text()]
    assert len(reports) == 1
    assert "heap-use-after-free" in reports[0].read_text()
    reports[0].unlink()
