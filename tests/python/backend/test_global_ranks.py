"""Errors in a group that is not all ranks: they name a rank by its number in the group, and among all ranks."""

import datetime
import re
import time

import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.hosts import PretendHost
from support.processes import await_all, run_ranks
from support.torch_features import SPLITS_GROUPS, prepare_to_split

pytestmark = only_on_cpu("errors of NCCL's operations have the ranks of the group alone")
MEMBERS = [1, 3]
FIRST, SECOND = "rank 0 (global rank 1", "rank 1 (global rank 3"
HOSTS = {"one host": (0, 0, 0, 0), "two hosts": (0, 0, 1, 1)}
LIMIT = datetime.timedelta(milliseconds=300)


def _backend(group):
    return group._get_backend(torch.device("cpu"))


def _time_out(rank, group):
    if rank == 3:
        time.sleep(1)
    else:
        _backend(group).set_timeout(LIMIT)
        dist.all_reduce(torch.ones(4), group=group)


def _end_a_wait(rank, group):
    if rank == 3:
        time.sleep(1)
    else:
        dist.all_reduce(torch.ones(4), group=group, async_op=True).wait(LIMIT)


def _lack_a_message(rank, group):
    if rank == 1:
        dist.irecv(torch.ones(4), 3, group=group).wait(LIMIT)


def _miss_the_barrier(rank, group):
    if rank == 3:
        time.sleep(1)
    group.monitored_barrier(LIMIT, False)


def _differ(rank, group):
    dist.all_reduce(torch.ones(4 + rank), group=group)


def _differ_in_a_message(rank, group):
    data = torch.ones(100_000 + rank)
    dist.recv(data, 3, group=group) if rank == 1 else dist.send(data, 1, group=group)


def _differ_in_a_sparse_tensor(rank, group):
    dist.all_reduce(torch.ones(3, rank).to_sparse(), group=group)


def _abort(rank, group):
    if rank == 3:
        _backend(group).abort()
    dist.recv(torch.ones(4), 4 - rank, group=group)


# What each of the two is told, as far as it is told anything.
CASES = {
    "a timeout": (_time_out, [f"ALLREDUCE number 0 on {FIRST}): not done after its timeout of 300 ms"], []),
    "a wait that ends": (_end_a_wait, [f"on {FIRST}): not done after the timeout of wait(), 300 ms", SECOND], []),
    "a missing message": (_lack_a_message, [f"recv from {SECOND}, host "], []),
    "a monitored barrier": (
        _miss_the_barrier,
        [f"{SECOND.capitalize()}) failed to pass monitoredBarrier"],
        [f", says {FIRST})"],
    ),
    "another call": (_differ, [f"{FIRST}) called ", f"{SECOND}, host "], [f"{SECOND}) called ", f"{FIRST}, host "]),
    "another message": (_differ_in_a_message, [f"{SECOND}, host "], []),
    "another sparse tensor": (
        _differ_in_a_sparse_tensor,
        [f"{SECOND}) has a sparse tensor ", f"as on {FIRST})"],
        [f"{FIRST}) has a sparse tensor ", f"as on {SECOND})"],
    ),
    "an abort": (_abort, [f"{SECOND}, host ", " aborted the group"], []),
}
ON_ONE_HOST = {"another call"}  # between hosts that is a message of another size


def _err(rank, world_size, case):
    group = dist.new_group(MEMBERS)
    error = ""
    if rank in MEMBERS:
        try:
            CASES[case][0](rank, group)
        except (RuntimeError, ValueError) as raised:
            error = str(raised)
    await_all(rank, world_size)
    return error


@pytest.mark.parametrize("where", HOSTS)
@pytest.mark.parametrize("case", CASES)
def test_an_error_names_ranks_by_both_their_numbers(case, where):
    if where != "one host" and case in ON_ONE_HOST:
        pytest.skip("told in another way between hosts")
    outcomes = run_ranks(_err, 4, "farandole", enter=PretendHost(HOSTS[where]), case=case)
    print(*outcomes, sep="\n")
    _, *told = CASES[case]
    for rank, expected in zip(MEMBERS, told, strict=True):
        for text in expected:
            assert text in outcomes[rank], outcomes[rank]
    for error in outcomes:  # no rank is named by one number only
        assert not re.search(r"rank \d+(?! \(GLOBAL)", re.sub(r"global rank \d+", "GLOBAL", error)), error
        assert "frame #" not in error, error


def _err_where_they_are_the_same(rank, world_size):
    group = dist.new_group([0, 1])
    if rank == 1:
        return ""
    with pytest.raises(dist.DistBackendError) as error:
        dist.irecv(torch.ones(4), 1, group=group).wait(LIMIT)
    return str(error.value)


def test_a_number_that_is_the_same_is_told_once():
    error = run_ranks(_err_where_they_are_the_same, 2, "farandole")[0]
    assert "rank 1 (host " in error and "global rank" not in error, error


def _err_in_made_groups(rank, world_size):
    prepare_to_split()
    part = dist.split_group(split_ranks=[MEMBERS, [0, 2]])
    smaller = None if rank == 0 else _backend(dist.group.WORLD).shrink([0])  # without its first rank
    errors = []
    if rank == 1:
        for receive in (lambda: dist.irecv(torch.ones(4), 3, group=part), lambda: smaller.recv([torch.ones(4)], 2, 0)):
            with pytest.raises(dist.DistBackendError) as raised:
                receive().wait(LIMIT)
            errors.append(str(raised.value))
    await_all(rank, world_size)
    return errors


@pytest.mark.skipif(not SPLITS_GROUPS, reason=f"torch {torch.__version__} splits no group without a GPU")
def test_groups_that_are_split_off_or_shrunk_know_the_global_ranks():
    split, shrunk = run_ranks(_err_in_made_groups, 4, "farandole")[1]
    assert f"recv from {SECOND}, host " in split, split
    assert "recv from rank 2 (global rank 3, host " in shrunk, shrunk
