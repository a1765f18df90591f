"""Runs Python tests on GPUs, several files at a time, each in a pytest of its own.

usage: gpu_tests.py [--jobs N] [--limit SECONDS] REPORTS [PATHS] [OPTIONS]

PATHS are files, folders or tests, in place of all that is for GPUs; from the first argument with a dash on all is
pytest's, for each file. What is in tests/python/gpu runs as it is, the rest with its models and tensors on GPUs
(FARANDOLE_TEST_DEVICE=cuda). Tests that measure times run last, one file after the other.

Processes that share a GPU take turns of milliseconds, which a rank that waits for another one spends in waiting. CUDA's
MPS has them side by side: where the driver has it, it runs for as long as the tests do. A process that ends while the
GPU works for it takes the GPU from the others there: files that fail so run again, alone and without MPS.

REPORTS/pytest, REPORTS/pytest-on-gpus    of each file what it wrote, and a report in JUnit's format
"""

import argparse
import contextlib
import itertools
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
from xml.sax.saxutils import quoteattr

ROOT = pathlib.Path(__file__).resolve().parent.parent
OF_GPUS = "tests/python/gpu"
ON_GPUS = tuple(f"tests/python/{name}" for name in ("pipelining", "ddp", "megatron_api", "sparse", "backend"))
NO_TESTS = 5  # of pytest's exit statuses
MPS = "CUDA_MPS_PIPE_DIRECTORY"
DEFAULT_MPS = pathlib.Path("/tmp/nvidia-mps")
MEASURING = ("test_measured_steps", "test_overlap", "test_streams", "test_ucx_messages")
TAKEN = re.compile("MPS server is not ready|is/are busy or unavailable|illegal memory access")
GRACE = 330.0  # seconds for the test that runs when the time is over: pytest gives it 300
GIBIBYTES_OF_A_FILE = 4.0  # of GPU memory, for its ranks


def jobs_here() -> int:
    """A file has about two processes that are busy, and as many that wait; MPS takes 48 of a GPU."""
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
        gibibytes = sum(map(float, told.split())) / 1024
    except (OSError, ValueError, subprocess.SubprocessError):
        gibibytes = 16.0
    return max(1, min(12, 3 * len(os.sched_getaffinity(0)) // 4, int(gibibytes / GIBIBYTES_OF_A_FILE)))


@contextlib.contextmanager
def mps(logs: pathlib.Path) -> Iterator[dict[str, str]]:
    """The environment of clients; empty where there is no MPS, or somebody has one already."""
    control = shutil.which("nvidia-cuda-mps-control")
    if control is None or MPS in os.environ or DEFAULT_MPS.exists():
        print(f"MPS {'is not there' if control is None else 'of others is left as it is'}", flush=True)
        yield {}
        return
    with tempfile.TemporaryDirectory(prefix="farandole-mps-", ignore_cleanup_errors=True) as folder:
        environment = {MPS: folder, "CUDA_MPS_LOG_DIRECTORY": str(logs)}
        of_client = os.environ | environment

        def ask(command: list[str], told: str = "", limit: float = 60) -> tuple[bool, str]:
            try:
                ended = subprocess.run(
                    command, input=told, env=of_client, capture_output=True, text=True, timeout=limit, check=False
                )
            except subprocess.TimeoutExpired:
                return False, ""
            return ended.returncode == 0, ended.stdout.strip()

        try:
            has_begun, _ = ask([control, "-d"])
            has_run, _ = ask([sys.executable, "-c", "import torch; torch.ones(1, device='cuda').item()"], limit=120)
            # Where there is no daemon CUDA goes without, and says nothing.
            works = has_begun and has_run and ask([control], "get_server_list\n")[1] != ""
            print(f"MPS {'has processes side by side on a GPU' if works else f'does not work: {logs}'}", flush=True)
            yield environment if works else {}
        finally:
            ask([control], "quit -t 5\n")


def found(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Files, or tests in them, and options of pytest."""
    paths = list(itertools.takewhile(lambda one: not one.startswith("-"), arguments))
    for path in paths:
        if not (ROOT / path.split("::")[0]).exists():
            sys.exit(f"test-gpu: there is no {path}; expected files, folders or tests, and then options of pytest")
    for late in arguments[len(paths) :]:  # pytest would run it once for each of all files
        if "/" in late and (ROOT / late.split("::")[0]).exists():
            sys.exit(
                f"test-gpu: {late} is behind options; expected files, folders or tests, and then options of pytest "
                "(a path that belongs to one: --option=path)"
            )
    files: list[str] = []
    for path in paths or [OF_GPUS, *ON_GPUS]:
        inside = sorted((ROOT / path).rglob("test_*.py")) if (ROOT / path).is_dir() else []
        files += [str(file.relative_to(ROOT)) if ROOT in file.parents else str(file) for file in inside] or [path]
    # As a rule what is longer takes longer, and begins first.
    ordered = sorted(dict.fromkeys(files), key=lambda file: -(ROOT / file.split("::")[0]).stat().st_size)
    return ordered, arguments[len(paths) :]


class Running:
    def __init__(
        self, test: str, options: list[str], reports: pathlib.Path, clients: dict[str, str], left: float
    ) -> None:
        self.test = test
        self._has_options = bool(options)
        self._is_client = bool(clients)
        self._ends = time.monotonic() + left + GRACE
        self._was_killed = False
        of_gpus = OF_GPUS in test
        where = {} if of_gpus else {"FARANDOLE_TEST_DEVICE": "cuda"}
        folder = reports / ("pytest" if of_gpus else "pytest-on-gpus")
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{len(list(folder.glob('*.log')))}-" + re.sub(r"\W+", "-", test).strip("-")[-150:]
        self._log, self._report = folder / f"{name}.log", folder / f"{name}.xml"
        limit = ["--session-timeout", str(int(left))] if left < float("inf") else []
        command = [sys.executable, "-m", "pytest", "--durations", "3", "--junitxml", str(self._report)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, *limit, *options, test],
                cwd=ROOT,
                env=os.environ | {"PYTHONFAULTHANDLER": "1"} | clients | where,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def has_ended(self) -> bool:
        if self._process.poll() is None and time.monotonic() > self._ends:
            self._was_killed = True
            self.kill()
        return self._process.poll() is not None

    def kill(self) -> None:
        """With what it has started, also where it has ended itself."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def was_harmed(self) -> bool:
        """By another process that ended, as far as can be seen."""
        has_failed = self._is_client and self._process.returncode != 0
        return has_failed and TAKEN.search(self._log.read_text(errors="replace")) is not None

    def forget(self) -> None:
        """It runs again: there is to be one report."""
        self._report.unlink(missing_ok=True)

    def tell(self) -> bool:
        """Whether it went well. What it wrote is shown where it did not."""
        text = self._log.read_text(errors="replace")
        code = self._process.returncode
        said = (text.strip().splitlines() or [""])[-1].strip("= ")
        is_well = code == 0 or (code == NO_TESTS and self._has_options)
        if code == 1 and "session-timeout:" in text and not re.search(r"\d (failed|error)", said):
            said, is_well = f"{said} until the time was over", True
        if self._was_killed:
            said = "killed, long after the time was over"
        elif code not in (0, 1, NO_TESTS):
            said = f"ended with status {code}: {said}"
        if not is_well and not self._report.exists():
            self._report.write_text(
                f'<testsuite><testcase classname="{pathlib.Path(self.test).stem}" name="the file">'
                f"<error message={quoteattr(said)}/></testcase></testsuite>\n"
            )
        print(f"{'' if is_well else text}{self.test}: {said}", flush=True)
        return is_well


def run(tests: list[str], options: list[str], reports: pathlib.Path, jobs: int, limit: float) -> bool:
    end = time.monotonic() + (limit or float("inf"))
    stops = {"-x", "--exitfirst"} & set(options)
    measuring = [test for test in tests if pathlib.Path(test.split("::")[0]).stem in MEASURING]
    waiting, running, is_well = [test for test in tests if test not in measuring] + measuring, list[Running](), True
    harmed: list[Running] = []  # in CUDA's MPS, by others
    reports.mkdir(parents=True, exist_ok=True)
    with mps(reports) as clients:
        try:
            while waiting or running:
                while waiting and len(running) < (1 if waiting[0] in measuring else jobs):
                    if (left := end - time.monotonic()) < 1:
                        break
                    running.append(Running(waiting.pop(0), options, reports, clients, left))
                if not running:
                    print("no time is left for", *waiting, flush=True)
                    break
                for one in [one for one in running if one.has_ended()]:
                    running.remove(one)
                    one.kill()
                    if one.was_harmed():
                        print(f"{one.test}: another process took the GPU from it: it runs again", flush=True)
                        harmed.append(one)
                    else:
                        is_well &= one.tell()
                if stops and not is_well:
                    break
                time.sleep(0.1)
            for one in harmed:
                left = end - time.monotonic()
                if left > 1 and not (stops and not is_well):
                    one.forget()
                    one = Running(one.test, options, reports, {}, left)
                    running.append(one)
                    while not one.has_ended():
                        time.sleep(0.1)
                    running.remove(one)
                    one.kill()
                is_well &= one.tell()
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
    for number in (signal.SIGTERM, signal.SIGHUP):  # what was started ends, too
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    return 0 if run(*found(options.arguments), options.reports, options.jobs, options.limit) else 1


if __name__ == "__main__":
    sys.exit(main())
