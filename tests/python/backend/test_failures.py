"""What the survivors are told when a rank of one host dies or aborts, and how soon."""

import datetime
import threading
import time

import pytest
import torch
import torch.distributed as dist

from backend.actions import ACTIONS, NAMED, OTHERS
from backend.failing import die_often
from support.devices import only_on_cpu
from support.processes import run_ranks

pytestmark = only_on_cpu("tests/python/gpu/test_failures has it on GPUs")

VICTIM = 1


@pytest.mark.parametrize("action", NAMED)
def test_a_rank_killed_at_random_moments_is_named_by_its_survivors_within_seconds(action, tmp_path):
    die_often(action, 3, VICTIM, tmp_path, "rank 1 (host ")


@pytest.mark.sample(4)
@pytest.mark.parametrize("action", OTHERS)
def test_a_rank_killed_in_any_other_operation_is_named_too(action, tmp_path):
    die_often(action, 3, VICTIM, tmp_path, "rank 1 (host ")


@pytest.mark.sample(3)
@pytest.mark.parametrize("action", ACTIONS)
def test_a_rank_killed_over_ucx_on_one_host_is_named_too(action, tmp_path):
    die_often(action, 3, VICTIM, tmp_path, "rank 1 (host ", times=2, env={"FARANDOLE_TRANSPORT": "ucx"})


@pytest.mark.sample(1)
@pytest.mark.parametrize("action", ["send", "recv", "batch", "all_to_all"])
def test_a_rank_killed_while_all_passes_through_the_rings_is_named_too(action, tmp_path):
    die_often(action, 3, VICTIM, tmp_path, "rank 1 (host ", times=2, env={"FARANDOLE_SHM_SINGLE_COPY": "off"})


def _abort(rank, world_size, pending):
    """Rank 1 aborts while 0 and 2 wait: for each other, for nobody, or for all."""
    dist.barrier()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    if rank == VICTIM:
        time.sleep(0.5)
        aborted_at = time.monotonic()
        backend.abort()
        time.sleep(1)  # the others are told by the abort, not by its end
        return aborted_at, []
    if pending == "recv":
        work = dist.irecv(torch.zeros(8), 2 - rank)
    elif pending == "any":
        work = dist.irecv(torch.zeros(8), None)
    else:
        work = dist.all_reduce(torch.ones(8), async_op=True)
    messages = []
    with pytest.raises(dist.DistBackendError) as error:
        work.wait()
    failed_at = time.monotonic()
    messages.append(str(error.value))
    with pytest.raises(dist.DistBackendError) as error:
        dist.send(torch.zeros(8), 2 - rank)
    return failed_at, [*messages, str(error.value)]


@pytest.mark.parametrize("pending", ["recv", "any", "all_reduce"])
def test_an_abort_ends_the_operations_of_all_ranks_of_the_host_at_once(pending):
    outcomes = run_ranks(_abort, 3, "farandole", timeout=60, pending=pending)
    aborted_at, _ = outcomes[VICTIM]
    for failed_at, messages in (outcomes[0], outcomes[2]):
        print(f"{pending}: told after {1e3 * (failed_at - aborted_at):.1f} ms")
        assert failed_at - aborted_at < 0.5
        for message in messages:
            assert "rank 1 (host " in message and "aborted the group" in message, message


def _wait_unwatched(rank, world_size):
    dist.barrier()
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    if rank == VICTIM:
        time.sleep(0.2)
        backend.abort()
        time.sleep(1)
        return "aborted"
    work = dist.irecv(torch.zeros(8), 2 - rank)  # nobody waits for it
    deadline = time.monotonic() + 10
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert work.is_completed()
    with pytest.raises(RuntimeError) as error:
        work.wait()
    return str(error.value)


def test_an_abort_ends_operations_that_nobody_waits_for():
    outcomes = run_ranks(_wait_unwatched, 3, "farandole", timeout=60)
    assert all("rank 1 (host " in outcomes[rank] for rank in (0, 2)), outcomes


def _shut_down(rank, world_size):
    dist.barrier()
    if rank == VICTIM:
        dist.destroy_process_group()
        time.sleep(1)
        return 0
    received = torch.zeros(8)
    work = dist.irecv(received, 2 - rank)
    sender = threading.Timer(0.7, lambda: dist.send(torch.ones(8), 2 - rank))
    sender.start()
    work.wait()
    sender.join()
    return received.sum().item()


def test_a_rank_that_shuts_its_group_down_does_not_disturb_what_others_do_among_themselves():
    assert run_ranks(_shut_down, 3, "farandole", timeout=60) == [8, 0, 8]


def _miss(rank, world_size):
    dist.barrier()
    if rank == VICTIM:
        time.sleep(1)
        return "late"
    dist.group.WORLD._get_backend(torch.device("cpu")).set_timeout(datetime.timedelta(milliseconds=300))
    with pytest.raises(dist.DistBackendError) as error:
        dist.all_reduce(torch.ones(8))
    return str(error.value)


def test_a_collective_that_times_out_names_the_rank_that_did_not_come():
    outcomes = run_ranks(_miss, 3, "farandole", timeout=60)
    # One of the two gives up first, and the other hears of it.
    messages = [outcomes[rank] for rank in (0, 2)]
    assert any("not done after its timeout of 300 ms, waits for rank 1 (host " in message for message in messages), (
        messages
    )
