"""Starts programs as their users do, by torchrun and by hand, with a bound on their time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys


def start(command: list[str], **environment: str) -> subprocess.Popen[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.Popen(
        command,
        env=inherited | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(processes: list[subprocess.Popen[str]], timeout: float = 100) -> list[tuple[int, str]]:
    """What they ended with and wrote; all are killed when one is not done in time."""
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]


def by_torchrun(ranks: int, *command: str, restarts: int = 0) -> tuple[int, str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    options = ["--nproc-per-node", str(ranks), "--max-restarts", str(restarts), "--no-python"]
    [result] = finish([start([*launcher, *options, *command])])
    return result


def by_hand(ranks: int, *command: str) -> list[tuple[int, str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return finish([start([*command], RANK=str(rank), **world) for rank in range(ranks)])
