"""Runs Python tests on GPUs, several files at a time, each in a pytest of its own.

usage: gpu_tests.py [--jobs N] [--limit SECONDS] REPORTS [ARGUMENTS]

ARGUMENTS that are there as files or folders, or tests in them, are run in place of all that is for GPUs; others are
options of pytest. What is in tests/python/gpu runs as it is, the rest with its models on GPUs
(FARANDOLE_TEST_DEVICE=cuda).

Processes that share a GPU take turns of milliseconds, which a rank that waits for another one spends in waiting. CUDA's
MPS has them side by side: where the driver has it, it runs for as long as the tests do.

REPORTS/pytest, REPORTS/pytest-on-gpus    of each file what it wrote, and a report in JUnit's format
"""

import argparse
import contextlib
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
OF_GPUS = "tests/python/gpu"
ON_GPUS = tuple(f"tests/python/{name}" for name in ("pipelining", "ddp", "megatron_api", "sparse", "backend"))
NO_TESTS = 5  # of pytest's exit statuses
MPS = "CUDA_MPS_PIPE_DIRECTORY"
GRACE = 60.0  # seconds for a test that runs when the time is over


def jobs_here() -> int:
    """A file has about two processes that are busy, and as many that wait."""
    return max(1, min(12, 3 * len(os.sched_getaffinity(0)) // 4))


@contextlib.contextmanager
def mps() -> Iterator[dict[str, str]]:
    """The environment of clients; empty where there is no MPS, or somebody has one already."""
    control = shutil.which("nvidia-cuda-mps-control")
    if MPS in os.environ or pathlib.Path("/tmp/nvidia-mps").exists() or control is None:
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="farandole-mps-") as folder:
        environment = {MPS: folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        of_client = os.environ | environment
        subprocess.run([control, "-d"], env=of_client, stdout=subprocess.DEVNULL, check=False)
        try:
            trial = [sys.executable, "-c", "import torch; torch.ones(1, device='cuda').item()"]
            works = subprocess.run(trial, env=of_client, capture_output=True, timeout=120, check=False).returncode == 0
            print(f"MPS {'has processes side by side on a GPU' if works else 'is there and does not work'}", flush=True)
            yield environment if works else {}
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                subprocess.run([control], input="quit -t 5\n", env=of_client, text=True, timeout=30, check=False)


def found(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Files, or tests in them, and options of pytest."""
    paths = [one for one in arguments if (ROOT / one.split("::")[0]).exists()]
    options = [one for one in arguments if one not in paths]
    files: list[str] = []
    for path in paths or [OF_GPUS, *ON_GPUS]:
        inside = sorted((ROOT / path).rglob("test_*.py")) if (ROOT / path).is_dir() else []
        files += [str(file.relative_to(ROOT)) if ROOT in file.parents else str(file) for file in inside] or [path]
    # As a rule what is longer takes longer, and begins first.
    return sorted(files, key=lambda file: -(ROOT / file.split("::")[0]).stat().st_size), options


class Running:
    def __init__(self, test: str, options: list[str], reports: pathlib.Path, mps: dict[str, str], left: float) -> None:
        self.test = test
        self._began = time.monotonic()
        self._ends = self._began + left + GRACE
        of_gpus = OF_GPUS in test
        folder = reports / ("pytest" if of_gpus else "pytest-on-gpus")
        folder.mkdir(parents=True, exist_ok=True)
        name = re.sub(r"\W+", "-", test).strip("-")
        self._log = folder / f"{name}.log"
        limit = ["--session-timeout", str(int(left))] if left < float("inf") else []
        command = [sys.executable, "-m", "pytest", "--durations", "3", "--junitxml", str(folder / f"{name}.xml")]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, *limit, *options, test],
                cwd=ROOT,
                env=os.environ | mps | ({} if of_gpus else {"FARANDOLE_TEST_DEVICE": "cuda"}),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        if self._process.poll() is None and time.monotonic() > self._ends:
            self.kill()
        return self._process.poll() is not None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def tell(self) -> bool:
        """Whether it went well. What it wrote is shown where it did not."""
        text = self._log.read_text(errors="replace")
        lines = text.strip().splitlines()
        said = lines[-1] if lines else f"exit status {self._process.returncode}"
        is_well = self._process.returncode in (0, NO_TESTS)
        if "session-timeout:" in text:
            said, is_well = f"{said} until the time was over", re.search(r"\d (failed|error)", said) is None
        print(f"{'' if is_well else text}{self.test}: {said.strip('= ')}", flush=True)
        return is_well


def run(tests: list[str], options: list[str], reports: pathlib.Path, jobs: int, limit: float) -> bool:
    end = time.monotonic() + (limit or float("inf"))
    waiting, running, is_well = list(tests), list[Running](), True
    with mps() as environment:
        try:
            while waiting or running:
                while waiting and len(running) < jobs and (left := end - time.monotonic()) >= 1:
                    running.append(Running(waiting.pop(0), options, reports, environment, left))
                if not running:
                    print("no time is left for", *waiting, flush=True)
                    break
                for one in [one for one in running if one.has_ended()]:
                    running.remove(one)
                    is_well &= one.tell()
                time.sleep(0.1)
        finally:
            for one in running:
                one.kill()
    return is_well


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("reports", type=pathlib.Path)
    parser.add_argument("--jobs", type=int, default=jobs_here(), help="how many files at a time")
    parser.add_argument("--limit", type=float, default=0, help="no test starts after so many seconds")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="paths, and options of pytest")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started ends, too
    return 0 if run(*found(options.arguments), options.reports, options.jobs, options.limit) else 1


if __name__ == "__main__":
    sys.exit(main())
