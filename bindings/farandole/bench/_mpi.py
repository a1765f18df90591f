"""Ranks of Intel MPI, from an environment of its own: it is no dependency of farandole's."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from dataclasses import astuple
from pathlib import Path
from types import TracebackType

from farandole.bench._lines import Channel, ask
from farandole.bench._peers import Peer, Repeat, slowest
from farandole.bench._ranks import RANKS
from farandole.bench._series import Sample

HOW_TO_GET_IT = "python -m venv DIR && DIR/bin/pip install impi-rt mpi4py numpy, then --mpi DIR"
_PROGRAM = Path(__file__).with_name("_mpi_rank.py")
_START_SECONDS = 60.0


class MpiPair:
    """Two ranks under mpiexec, which live for the whole run and sleep between measurements. A context manager.

    Args:
        prefix: of an environment with the wheels impi-rt, mpi4py and numpy.
    """

    def __init__(self, prefix: Path) -> None:
        mpiexec, python, library = (prefix / part for part in ("bin/mpiexec", "bin/python", "lib/libmpi.so.12"))
        for file in (mpiexec, python, library):
            if not file.exists():
                raise RuntimeError(f"{file} is not there; --mpi expects an environment with Intel MPI: {HOW_TO_GET_IT}")
        self._stack = contextlib.ExitStack()
        folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="farandole-bench-")))
        self._listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        self.address = str(folder / "socket")
        self._listener.bind(self.address)
        self._listener.listen(RANKS)
        self._errors = self._stack.enter_context((folder / "errors").open("w+"))
        environment = dict(os.environ)
        environment.pop("PYTHONPATH", None)
        environment |= {
            "MPI4PY_LIBMPI": str(library),
            "LD_LIBRARY_PATH": str(library.parent),
            "OMP_NUM_THREADS": "1",
            "NUMPY_MADVISE_HUGEPAGE": "0",  # pages of the same size as torch's
        }
        self._mpiexec = subprocess.Popen(
            [mpiexec, "-n", str(RANKS), python, _PROGRAM, self.address],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._errors,
            stderr=self._errors,
        )
        self._channels: list[Channel] = []
        self.library = ""  # its name and version

    def __enter__(self) -> MpiPair:
        try:
            self._accept(time.monotonic() + _START_SECONDS)
        except BaseException:
            self._end(patience=0)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(patience=10 if error is None else 0)

    def peer(self, operation: str) -> Peer:
        """What measures an operation, by the name that it has in torch.distributed."""

        def measure(repeat: Repeat) -> list[Sample]:
            return self._measure(operation, repeat)

        return measure

    def _measure(self, operation: str, repeat: Repeat, timeout: float = 120.0) -> list[Sample]:
        line = " ".join([operation, *map(str, astuple(repeat))])
        try:
            ranks = ask("Intel MPI", self._channels, line, timeout)
        except RuntimeError as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._mpiexec.wait(timeout=2)  # it ends soon after a rank, and then has said why
            raise RuntimeError(f"{error}\n{self._printed()}") from None
        return slowest([[Sample(*sample) for sample in samples] for samples in ranks])

    def _accept(self, deadline: float) -> None:
        by_rank: dict[int, Channel] = {}
        while len(by_rank) < RANKS:
            self._listener.settimeout(1.0)
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                if self._mpiexec.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"Intel MPI did not start:\n{self._printed()}") from None
                continue
            connection.settimeout(None)
            with connection:  # the files keep it open
                channel = Channel(connection.makefile("w"), connection.makefile("r"))
            rank, self.library = json.loads(channel.answers.readline())
            by_rank[rank] = channel
        self._channels = [by_rank[rank] for rank in range(RANKS)]

    def _printed(self) -> str:
        self._errors.flush()
        self._errors.seek(0)
        return self._errors.read()[-2000:]

    def _end(self, patience: float) -> None:
        for channel in self._channels:
            for file in channel:  # the end of the connection ends the ranks
                with contextlib.suppress(OSError):
                    file.close()
        try:
            self._mpiexec.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            self._mpiexec.terminate()  # passes it on to the ranks
            try:
                self._mpiexec.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self._mpiexec.kill()
                self._mpiexec.wait()
        self._stack.close()
