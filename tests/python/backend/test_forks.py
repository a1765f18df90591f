"""What a process that was forked from a rank may do with the rank's group, and without."""

import os
import traceback

import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.processes import run_ranks

pytestmark = only_on_cpu("CUDA does not live on in a child")


def _in_child(fn, *args):
    """Its exit code, 0 where nothing was raised."""
    child = os.fork()
    if child == 0:
        try:
            fn(*args)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _use(rank, world_size):
    x, peer = torch.ones(2), 1 - rank
    calls = [
        lambda: dist.all_reduce(x),
        lambda: dist.barrier(),
        lambda: dist.isend(x, peer),
        lambda: dist.irecv(x),
        lambda: dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer)]),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="this process was forked from the one that made the group"):
            call()


def _wait(work):
    with pytest.raises(RuntimeError, match=r"recv: wait\(\) in a process that was forked from the one that began it"):
        work.wait()


def _make_another(folder, rank):
    dist.destroy_process_group()
    dist.init_process_group("farandole", store=dist.FileStore(f"{folder}/{rank}", 1), rank=0, world_size=1)
    x = torch.ones(2)
    dist.all_reduce(x)
    assert x.tolist() == [1, 1]
    dist.destroy_process_group()


def _fork(rank, world_size, folder):
    x = torch.ones(2)
    dist.all_reduce(x)
    y = torch.zeros(2)
    receiving = dist.irecv(y, 1 - rank)
    dist.barrier()
    codes = [_in_child(_use, rank, world_size), _in_child(_wait, receiving), _in_child(_make_another, folder, rank)]
    dist.barrier()
    dist.send(x, 1 - rank)
    receiving.wait()
    assert y.tolist() == [2, 2]
    dist.all_reduce(x)  # as if nobody had tried
    assert x.tolist() == [4, 4]
    return codes


def test_a_forked_child_is_refused_its_parents_group_and_may_make_another(tmp_path):
    assert run_ranks(_fork, 2, "farandole", folder=str(tmp_path)) == [[0, 0, 0]] * 2
