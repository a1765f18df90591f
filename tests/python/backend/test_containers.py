"""Ranks in namespaces of process ids of their own, as those of containers that share a host's memory and network are."""

import ctypes
import datetime
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.processes import run_ranks

pytestmark = only_on_cpu("a host's memory is what it is about")

CLONE_NEWPID = 0x20000000
VICTIM = 1


def _may_unshare():
    if (child := os.fork()) == 0:
        os._exit(ctypes.CDLL(None).unshare(CLONE_NEWPID) != 0)
    return os.waitpid(child, 0)[1] == 0


def _in_own_namespace(body, afterwards):
    """Runs ``body`` in a child of the first process of a new namespace, whose end is that of all in it; that one goes
    on with ``afterwards``.
    """
    assert ctypes.CDLL(None).unshare(CLONE_NEWPID) == 0
    if (first := os.fork()) == 0:
        if (second := os.fork()) == 0:
            try:
                body()
            finally:
                os._exit(1)
        os.waitpid(second, 0)
        try:
            afterwards()
        finally:
            os._exit(0)
    os.waitpid(first, 0)


def _lose_one(rank, world_size, folder, action):
    def body():
        store = dist.FileStore(os.path.join(folder, "store"), world_size)
        limit = datetime.timedelta(seconds=20)
        dist.init_process_group("farandole", store=store, rank=rank, world_size=world_size, timeout=limit)
        x = torch.ones(4)
        dist.all_reduce(x)
        assert x.tolist() == [world_size] * 4 and os.getpid() == 2
        if rank == VICTIM:
            if os.fork() == 0:  # holds all that its parent has open, and outlives it for as long as the namespace
                time.sleep(60)
                os._exit(0)
            dist.barrier()
            with open(os.path.join(folder, "killed"), "w") as file:
                file.write(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        try:
            dist.recv(x, VICTIM) if action == "recv" else dist.all_reduce(x)
            text = "nothing failed"
        except dist.DistBackendError as error:
            text = str(error)
        with open(os.path.join(folder, f"told {rank}"), "w") as file:
            file.write(f"{time.monotonic()} {text}")

    def outlive_it():
        end = time.monotonic() + 40
        told = [os.path.join(folder, f"told {other}") for other in range(world_size) if other != VICTIM]
        while rank == VICTIM and not all(map(os.path.exists, told)) and time.monotonic() < end:
            time.sleep(0.01)

    _in_own_namespace(body, outlive_it)


@pytest.mark.skipif(not _may_unshare(), reason="this user may make no namespaces")
@pytest.mark.parametrize("action", ["recv", "all_reduce"])
def test_a_death_in_another_namespace_is_told_though_a_forked_child_lives(action, tmp_path):
    run_ranks(_lose_one, 3, None, timeout=60, folder=str(tmp_path), action=action)
    killed = float((tmp_path / "killed").read_text())
    for rank in (0, 2):
        told, _, text = (tmp_path / f"told {rank}").read_text().partition(" ")
        print(f"rank {rank} after {1e3 * (float(told) - killed):.0f} ms: {text}")
        assert "rank 1 (host " in text and "its process died" in text, text
        assert float(told) - killed < 5
