"""Peers that are programs of their own: UCX's ucx_perftest, and our C++ benchmark."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import os
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from farandole.bench._lines import Channel, ask
from farandole.bench._ranks import RANKS
from farandole.bench._series import Sample

_LISTEN = "0A"  # in /proc/net/tcp


class PerfTest:
    """UCX's own ping-pong of tagged messages: a server and a client that spin, over this host's fastest lane."""

    def __init__(self) -> None:
        self._environment = dict(os.environ)
        found = importlib.util.find_spec("libucx")
        if found is not None and found.origin is not None:
            root = Path(found.origin).parent
            self._program = str(root / "bin" / "ucx_perftest")
            self._environment["LD_LIBRARY_PATH"] = str(root / "lib")
        else:
            self._program = shutil.which("ucx_perftest") or ""
        if not os.access(self._program, os.X_OK):
            raise RuntimeError("ucx_perftest was found neither in a libucx wheel nor in PATH; expected one of them")

    def half_round_trip(self, size: int, warm_up: int, count: int, timeout: float = 120.0) -> Sample:
        """Seconds for ``size`` bytes. The median is over the last 2048 messages (as much as ucx_perftest keeps)."""
        port = _free_port()
        server = self._start("-p", str(port))
        try:
            self._await_listening(server, port, timeout)
            test = ["-t", "tag_lat", "-s", str(size), "-w", str(warm_up), "-n", str(count), "-f", "-v"]
            client = self._start("127.0.0.1", "-p", str(port), *test)
            try:
                output, errors = client.communicate(timeout=timeout)
            finally:
                client.kill()
        finally:
            server.kill()
            server.communicate()
        if client.returncode != 0:
            raise RuntimeError(f"ucx_perftest ended with exit status {client.returncode}: {errors or output}")
        row = list(csv.DictReader(output.splitlines()))[-1]
        return Sample(float(row["50.0_percentile_lat"]) * 1e-6, float(row["overall_lat"]) * 1e-6)

    def _start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self._program, *arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _await_listening(self, server: subprocess.Popen[str], port: int, timeout: float) -> None:
        # A connection that only probes would be taken for the client.
        deadline = time.monotonic() + timeout
        while not _is_listening(port):
            if server.poll() is not None or time.monotonic() > deadline:
                server.kill()
                raise RuntimeError(f"the server of ucx_perftest did not start: {''.join(server.communicate())}")
            time.sleep(0.01)


class CppPair:
    """Two processes of bench_point_to_point, which stay connected. Use as a context manager."""

    def __init__(self, programs: Path) -> None:
        program = programs / "bench_point_to_point"
        if not os.access(program, os.X_OK):
            raise RuntimeError(f"{program} is not there; expected the build with FARANDOLE_BENCHMARKS=ON in --programs")
        self._folder = tempfile.TemporaryDirectory(prefix="farandole-bench-")
        store = str(Path(self._folder.name) / "store")
        self._processes = [
            subprocess.Popen([program, str(rank), store], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for rank in range(RANKS)
        ]
        self._channels = [
            Channel(process.stdin, process.stdout)
            for process in self._processes
            if process.stdin is not None and process.stdout is not None
        ]

    def __enter__(self) -> CppPair:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in self._channels:
            with contextlib.suppress(BrokenPipeError):
                channel.questions.close()
        for process in self._processes:
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for channel in self._channels:
            channel.answers.close()
        self._folder.cleanup()

    def half_round_trip(
        self, path: str, size: int, warm_up: int, count: int, samples: int, timeout: float = 120.0
    ) -> list[Sample]:
        """Seconds for ``size`` bytes by "backend", "group" or "noop" (bench_point_to_point.cc), seen by rank 0."""
        line = f"{path} {size} {warm_up} {count} {samples}"
        answers = ask("bench_point_to_point", self._channels, line, timeout)
        return [Sample(*sample) for sample in answers[0]]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _is_listening(port: int) -> bool:
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(row[1].endswith(f":{port:04X}") and row[3] == _LISTEN for row in rows)
