"""A group that one rank cannot join, or is not meant to: all ranks are told why, long before the timeout."""

import datetime
import os
import random
import resource
import time

import pytest
import torch
import torch.distributed as dist

from farandole import _C
from support.devices import only_on_cpu
from support.processes import run_ranks

pytestmark = only_on_cpu("groups meet on the CPU")

BOUND = 15  # seconds, of a timeout of 60


def _init(store, rank, size, **options):
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group(
        "farandole", store=dist.FileStore(str(store), -1), rank=rank, world_size=size, timeout=limit, **options
    )


def _refusal(store, rank, size, **options):
    """What the rank is told, soon."""
    begun = time.monotonic()
    with pytest.raises((dist.DistBackendError, ValueError, RuntimeError)) as error:
        _init(store, rank, size, **options)
    assert time.monotonic() - begun < BOUND, error.value
    return str(error.value)


SETTINGS = {
    "FARANDOLE_ALGORITHMS": "all_reduce=waltz",
    "FARANDOLE_SHM_WINDOW_BYTES": "many",
    "FARANDOLE_CUDA_MESSAGES": "pigeons",
    "FARANDOLE_FLIGHT_RECORDER": "nobody",
    "FARANDOLE_TRANSPORT": "pigeons",
    "pg_options": "of gloo's",
}


def _join_with_a_bad_setting(rank, size, store, culprit, setting, late):
    options = {}
    if rank == culprit and setting == "pg_options":
        options["pg_options"] = dist.ProcessGroupGloo._Options() if hasattr(dist, "ProcessGroupGloo") else object()
    elif rank == culprit:
        os.environ[setting] = SETTINGS[setting]
    if (rank == culprit) == late:
        time.sleep(1)
    return _refusal(store, rank, size, **options)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize("setting", SETTINGS)
def test_a_rank_that_is_refused_before_it_meets_the_others_tells_them_why(setting, culprit, late, tmp_path):
    texts = run_ranks(
        _join_with_a_bad_setting, 3, None, store=tmp_path / "store", culprit=culprit, setting=setting, late=late
    )
    for rank, text in enumerate(texts):
        assert setting in text, (rank, text)
        assert rank == culprit or f"rank {culprit} has given the group up" in text.replace("(global rank", "("), text


def _join_as(rank, _, store, sizes, ranks):
    time.sleep(0.3 * random.random())
    return _refusal(store, ranks[rank], sizes[rank])


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2), (3, 3, 4), (4, 3, 3), (3, 3, 2)], ids=str)
def test_ranks_with_groups_of_different_sizes_are_told(sizes, tmp_path):
    texts = run_ranks(_join_as, len(sizes), None, store=tmp_path / "store", sizes=sizes, ranks=range(len(sizes)))
    told = "rank is 2; expected 0 to 1" if sizes == (3, 3, 2) else "expected the same on all ranks"
    for rank, text in enumerate(texts):
        assert told in text, (rank, text)


def test_a_rank_that_is_there_twice_is_told_to_all(tmp_path):
    texts = run_ranks(_join_as, 3, None, store=tmp_path / "store", sizes=[3] * 3, ranks=[0, 1, 1])
    for rank, text in enumerate(texts):
        assert "two processes have come as rank 1" in text, (rank, text)


def _join_as_a_second_rank_zero(rank, _, store):
    if rank == 0:
        return _refusal(store, 0, 2)
    time.sleep(1 if rank == 1 else 2.5)  # who is asked last finds the latest one
    _init(store, rank - 1, 2)
    return "joined"


def test_a_rank_zero_that_was_there_before_another_one_is_told(tmp_path):
    told, *others = run_ranks(_join_as_a_second_rank_zero, 3, None, store=tmp_path / "store")
    assert "two processes have come as rank 0" in told
    assert others == ["joined"] * 2


def _sum_in_a_new_group(store, rank, size):
    options = dist.distributed_c10d._DistributedBackendOptions()
    options.store, options.group_rank, options.group_size = store, rank, size
    options.timeout = datetime.timedelta(seconds=60)
    options.group_id, options.global_ranks_in_group = "few descriptors", list(range(size))
    group = _C.create_backend(options)
    ones = torch.ones(3)
    group.allreduce([ones]).wait()
    assert ones.tolist() == [size] * 3


def _meet_without_descriptors(rank, size, port, culprit, has_met):
    """Groups, while the culprit has room for some descriptors more; each time for others."""
    store = dist.TCPStore("127.0.0.1", port)
    if has_met:
        dist.init_process_group("farandole", store=store, rank=rank, world_size=size)
    outcomes = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for room in range(24):
        begun = time.monotonic()
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        holes = [os.dup(0)]  # what is free below the highest one is taken
        while holes[-1] <= highest:
            holes.append(os.dup(0))
        if rank == culprit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (holes[-1] + 1 + room, hard))
        try:
            _sum_in_a_new_group(dist.PrefixStore(str(room), store), rank, size)
            outcomes.append("")
        except (dist.DistBackendError, ValueError, RuntimeError) as error:
            outcomes.append(str(error))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in holes:
            os.close(descriptor)
        assert time.monotonic() - begun < BOUND, (room, outcomes[-1])
        store.set(f"done {room} {rank}", "")
        store.wait([f"done {room} {other}" for other in range(size)])
    return outcomes


@pytest.mark.parametrize("has_met", [False, True])
@pytest.mark.parametrize("culprit", [0, 1])
def test_descriptors_that_run_out_are_named_on_all_ranks(culprit, has_met):
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    texts = run_ranks(_meet_without_descriptors, 2, None, port=server.port, culprit=culprit, has_met=has_met)
    failed = [bool(text) for text in texts[culprit]]
    assert any(failed), "there was room for all"
    assert not all(failed), texts[culprit][-1]
    for room, outcome in enumerate(zip(*texts)):
        for rank, text in enumerate(outcome):
            assert bool(text) == failed[room], (room, outcome)
            assert not text or "descriptors" in text or "Too many open files" in text, (room, rank, text)
            assert "died" not in text, (room, rank, text)
