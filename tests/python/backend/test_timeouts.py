"""Time limits of single operations: of wait(), and of the options that c10d's calls take."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from support.devices import ON_CPU, only_on_cpu
from support.hosts import Hosts
from support.processes import await_all, run_ranks

LATE = 1  # the rank that does not come
LIMIT = datetime.timedelta(milliseconds=300)
HOST_OF_RANK = (0, 0, 1)
PLACES = ["one host", pytest.param("two hosts", marks=only_on_cpu("NCCL has one network where ranks share a GPU"))]


def _run(fn, where, **kwargs):
    if where == "one host":
        return run_ranks(fn, 3, "farandole", **kwargs)
    with Hosts(2) as hosts:
        return run_ranks(fn, 3, "farandole", enter=hosts.enter(HOST_OF_RANK), **kwargs)


def _parts(world_size):
    return torch.zeros(world_size, 4)


def _with(options, **values):
    for name, value in {"timeout": LIMIT, **values}.items():
        setattr(options, name, value)
    return options


# What a group of 3 is called with, as c10d's own methods have it; each with a time limit of its own.
CALLS = {
    "allreduce": lambda pg, n: pg.allreduce([torch.ones(4)], _with(dist.AllreduceOptions())),
    "allreduce_large": lambda pg, n: pg.allreduce([torch.ones(3_000_000)], _with(dist.AllreduceOptions())),
    "broadcast": lambda pg, n: pg.broadcast([torch.ones(4)], _with(dist.BroadcastOptions(), rootRank=LATE)),
    "allgather": lambda pg, n: pg.allgather([list(_parts(n))], [torch.ones(4)], _with(c10d.AllgatherOptions())),
    "alltoall_base": lambda pg, n: pg.alltoall_base(_parts(n), _parts(n), [], [], _with(dist.AllToAllOptions())),
    "reduce_scatter": lambda pg, n: pg.reduce_scatter(
        [torch.ones(4)], [list(_parts(n))], _with(dist.ReduceScatterOptions())
    ),
    "barrier": lambda pg, n: pg.barrier(_with(dist.BarrierOptions())),
}
BARRIER = pytest.param("barrier", marks=only_on_cpu("it is the CPU's"))


def _wait(rank, world_size, call):
    """Rank 1 stays away; the others' limit is the options'."""
    group = dist.group.WORLD
    ready = torch.ones(4)
    dist.all_reduce(ready)  # to which all ranks come: the first one connects them
    assert ready.tolist() == [world_size] * 4
    result = None
    if rank != LATE:
        start = time.monotonic()
        with pytest.raises(dist.DistBackendError) as error:
            work = CALLS[call](group, world_size)  # NCCL waits here where it has to connect the ranks for it
            work.wait() if ON_CPU else work.wait(datetime.timedelta(seconds=20))  # else the host does not wait
        result = time.monotonic() - start, str(error.value)
        with pytest.raises(dist.DistBackendError):  # the others may wait for what this rank will not do
            dist.barrier()
    await_all(rank, world_size)
    return result


def _check(outcomes, where):
    assert max(outcomes[rank][0] for rank in (0, 2)) > 0.29
    if not ON_CPU:  # NCCL does not tell who is missing
        assert max(outcomes[rank][0] for rank in (0, 2)) < 10
        assert any("it did not end within its timeout" in outcomes[rank][1] for rank in (0, 2)), outcomes
        return
    for rank in (0, 2):
        seconds, message = outcomes[rank]
        assert seconds < 5, (seconds, message)
        print(f"rank {rank} after {1e3 * seconds:.0f} ms: {message}")
        # One gives up first, and the other hears of it; or it waits for one that waits for who is missing.
        assert "not done after its timeout of 300 ms" in message, message
        told = "rank 1 (host " if where == "one host" else "rank 1 has called 1 collectives "
        assert told in message, message


@pytest.mark.sample(4)
@pytest.mark.parametrize("call", [*(call for call in CALLS if call != "barrier"), BARRIER])
@pytest.mark.parametrize("where", PLACES)
def test_the_limit_in_a_calls_options_holds_and_names_who_is_missing(call, where):
    _check(_run(_wait, where, call=call), where)


def _for_a_thousand_years(rank, world_size):
    forever = datetime.timedelta(days=365_000)
    group = dist.new_group(range(world_size), timeout=forever)
    if rank == 1:
        time.sleep(0.2)
    ones = torch.ones(3)
    dist.all_reduce(ones, group=group)
    dist.all_reduce(ones, async_op=True).wait(forever)
    if rank == 0:
        dist.isend(ones, 1, group).wait(forever)
    else:
        dist.irecv(ones, 0, group).wait(forever)
    return ones.tolist()


def test_a_limit_beyond_the_end_of_the_clock_is_none():
    assert run_ranks(_for_a_thousand_years, 2, "farandole") == [[4.0] * 3] * 2


def _starts(world_size):
    """Collectives, each with what it gives."""
    sparse, total = torch.eye(3).to_sparse(), torch.eye(3) * world_size
    small, large, gathered = torch.ones(4), torch.ones(3_000_000), torch.zeros(world_size)
    return {
        "all_reduce": (lambda: dist.all_reduce(small, async_op=True), lambda: small, torch.full((4,), world_size)),
        "large": (lambda: dist.all_reduce(large, async_op=True), lambda: large[-4:], torch.full((4,), world_size)),
        "all_gather": (
            lambda: dist.all_gather_into_tensor(gathered, torch.ones(1), async_op=True), lambda: gathered,
            torch.ones(world_size),
        ),
        "sparse": (lambda: dist.all_reduce(sparse, async_op=True), sparse.to_dense, total),
    }  # fmt: skip


def _wait_again(rank, world_size, call):
    """The late rank comes when the others have waited as long as they would; they look again, each in its way."""
    dist.all_reduce(torch.ones(4))
    start, result, expected = _starts(world_size)[call]
    message = seconds = None
    if rank == LATE:
        await_all(rank, world_size, "to their limit")
        work = start()
    else:
        began = time.monotonic()
        work = start()
        with pytest.raises(
            dist.DistBackendError, match=r"not done after the timeout of wait\(\), 300 ms; it goes on"
        ) as error:
            work.wait(LIMIT)
        seconds, message = time.monotonic() - began, str(error.value)
        assert not work.is_completed() and not work.is_success()
        await_all(rank, world_size, "to their limit")
    if rank == 0:
        work.wait()
    else:
        end = time.monotonic() + 20
        while not work.is_completed():
            assert time.monotonic() < end
            time.sleep(0.001)
    assert work.is_success() and torch.equal(result(), expected.to(result().dtype))
    ready = torch.ones(1)
    dist.all_reduce(ready)
    assert ready.item() == world_size
    return seconds, message


@only_on_cpu("on a GPU results are waited for by streams")
@pytest.mark.sample(4)
@pytest.mark.parametrize("call", ["all_reduce", "large", "all_gather", "sparse"])
@pytest.mark.parametrize("where", ["one host", "two hosts"])
def test_after_the_limit_of_wait_a_collective_goes_on_and_may_be_waited_for_again(call, where):
    outcomes = _run(_wait_again, where, call=call)
    for rank in (0, 2):
        seconds, message = outcomes[rank]
        assert 0.29 < seconds < 5, (seconds, message)
        print(f"rank {rank} after {1e3 * seconds:.0f} ms: {message}")
        told = "rank 1 (host " if where == "one host" else "rank 1 has called 1 collectives "
        assert told in message, message


def _own_limit_after_that_of_wait(rank, world_size):
    dist.all_reduce(torch.ones(4))
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    backend.set_timeout(datetime.timedelta(seconds=1))
    if rank != LATE:
        start = time.monotonic()
        work = dist.all_reduce(torch.ones(4), async_op=True)
        with pytest.raises(dist.DistBackendError, match="it goes on"):
            work.wait(LIMIT)
        with pytest.raises(dist.DistBackendError, match=r"rank 1 \(host "):
            work.wait()
        assert 0.9 < time.monotonic() - start < 5
        with pytest.raises(dist.DistBackendError):
            dist.barrier()
    await_all(rank, world_size)
    return True


@only_on_cpu("on a GPU results are waited for by streams")
def test_a_collectives_own_limit_holds_after_that_of_wait():
    assert all(run_ranks(_own_limit_after_that_of_wait, 3, "farandole"))
