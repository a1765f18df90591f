"""What a death is for several works at once, for the groups that have no part in it, and for one that is being made."""

import datetime
import os
import re
import resource
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from backend.failing import BOUND, Killer, Progress, first_seed, random_delay
from farandole import _C
from support.devices import only_on_cpu
from support.hosts import PretendHost
from support.processes import await_all, run_ranks

pytestmark = only_on_cpu("the CPU side knows the dead for both")

VICTIM = 1
TRANSPORTS = {"shm": {}, "ucx": {"FARANDOLE_TRANSPORT": "ucx"}}


def _killed(fn, world_size, folder, **options):
    """Runs it while the victim is killed; when that was, and what the ranks return."""
    seed = first_seed()
    delay = random_delay(seed)
    print(f"FARANDOLE_FAILURE_SEED={seed}: killed after {1e3 * delay:.1f} ms")
    path = folder / "progress"
    with Killer(path, delay) as killer:
        outcomes = run_ranks(fn, world_size, "farandole", may_die={VICTIM}, path=path, **options)
    assert outcomes[VICTIM] is None
    return killer.killed_at, outcomes


def _pending(rank, world_size, path):
    """Works of many kinds, which all wait for the victim in some way."""
    large, small = torch.ones(3_000_000), torch.ones(10)
    parts = torch.zeros(world_size, 10)
    other = 2 - rank
    await_all(rank, world_size, "to the death")
    if rank == VICTIM:
        Progress(path).set(1, 0)
        time.sleep(20)
    works = {
        "recv": dist.irecv(torch.zeros(8), VICTIM, tag=1),
        "recv from any": dist.irecv(torch.zeros(8), None, tag=2),
        "recv of a survivor": dist.irecv(torch.zeros(8), other, tag=3),
        "large send": dist.isend(large, VICTIM, tag=4),
        "large all_reduce": dist.all_reduce(large.clone(), async_op=True),
        "all_reduce": dist.all_reduce(small, async_op=True),
        "broadcast": dist.broadcast(small.clone(), VICTIM, async_op=True),
        "all_gather": dist.all_gather_into_tensor(parts, small.clone(), async_op=True),
        "all_to_all": dist.all_to_all_single(parts[:, :3].contiguous(), parts[:, 3:6].contiguous(), async_op=True),
        "barrier": dist.barrier(async_op=True),
    }
    batch = [dist.P2POp(dist.irecv, torch.zeros(8), peer, tag=5) for peer in (VICTIM, other)]
    works |= {f"batch {i}": work for i, work in enumerate(dist.batch_isend_irecv(batch))}
    future = works["all_reduce"].get_future()
    errors = {}

    def wait(name):
        try:
            works[name].wait()
            errors[name] = "no error"
        except dist.DistBackendError as error:
            errors[name] = str(error)

    threads = [threading.Thread(target=wait, args=(name,)) for name in list(works)[::3]]  # others are waited for here
    for thread in threads:
        thread.start()
    for name in works:
        wait(name)
    for thread in threads:
        thread.join()
    with pytest.raises(RuntimeError) as error:
        future.wait()
    return time.monotonic(), errors | {"future": str(error.value)}


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_works_that_are_pending_end_and_name_the_dead(transport, tmp_path):
    killed_at, outcomes = _killed(_pending, 3, tmp_path, env=TRANSPORTS[transport])
    for rank in (0, 2):
        ended_at, errors = outcomes[rank]
        assert ended_at - killed_at < BOUND
        assert len(errors) >= 12
        for name, text in errors.items():
            assert "rank 1 (host " in text and "its process died" in text, (rank, name, text)


def _groups(rank, world_size, path):
    without = dist.new_group([0, 2, 3])
    with_it = {"two": dist.new_group([0, 1]), "three": dist.new_group([1, 2, 3]), "world": dist.group.WORLD}
    mine = {name: group for name, group in with_it.items() if rank in dist.get_process_group_ranks(group)}
    tensors = {name: torch.ones(400_000) for name in mine}
    await_all(rank, world_size, "to the death")
    if rank == VICTIM:
        Progress(path).set(1, 0)
        time.sleep(20)
    pending = {
        name: dist.all_reduce(tensors[name], group=group, async_op=True)
        for name, group in sorted(mine.items(), key=lambda item: item[0])
    }
    errors = {}
    failed_at = 0.0
    stop = torch.zeros(1)
    sums = 0
    deadline = time.monotonic() + 20
    while not stop.item():  # of the others too: each does as many
        for size in (10, 400_000):
            x = torch.full((size,), float(rank))
            dist.all_reduce(x, group=without)
            assert x.min() == x.max() == 0 + 2 + 3
            sums += 1
        for name, work in list(pending.items()):
            if work.is_completed():
                with pytest.raises(dist.DistBackendError) as error:
                    work.wait()
                with pytest.raises(dist.DistBackendError) as later:
                    dist.all_reduce(torch.ones(1), group=mine[name])
                errors[name] = [str(error.value), str(later.value)]
                del pending[name]
                failed_at = failed_at or time.monotonic()
        stop[0] = not pending or time.monotonic() > deadline
        dist.all_reduce(stop, dist.ReduceOp.MIN, group=without)
    assert not pending
    for _ in range(20):  # with the others gone for good
        dist.all_reduce(torch.ones(1000), group=without)
    return failed_at, errors, sums


@pytest.mark.parametrize("transport", [*TRANSPORTS, "two hosts"])
def test_a_group_without_the_dead_goes_on_and_those_with_it_name_it(transport, tmp_path):
    killed_at, outcomes = _killed(_groups, 4, tmp_path, **_options(transport))
    # A group's errors count in the group.
    name_in = {"two": r"rank 1 \(", "three": r"rank 0 \(global rank 1, ", "world": r"rank 1 \("}
    pids = set()
    for rank in (0, 2, 3):
        failed_at, errors, sums = outcomes[rank]
        assert set(errors) == {"world", "two" if rank == 0 else "three"}
        assert 0 < failed_at - killed_at < BOUND and sums > 0
        for name, messages in errors.items():
            for message in messages:
                told = re.search(name_in[name] + r"host [^,]*, pid (\d+)\) (failed|is gone): its process ", message)
                assert told, (rank, name, message)
                pids.add(told[1])
    assert len(pids) == 1


def _end(moment):
    """Of the victim, whom the others wait for: before they do, meanwhile, and once it has said that it is there."""
    if moment == "joined":
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return
    if moment == "meanwhile":
        time.sleep(1)
    if moment == "in order":  # as at the end of a process, which other tests have
        _C.leave()
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


def _make_group(rank, world_size, members, moment, limit):
    dist.barrier()
    await_all(rank, world_size, "out of the barrier")  # in which the victim's death would be an error, too
    start = time.monotonic()
    if rank == VICTIM:
        _end(moment)
    if rank not in members:
        assert dist.new_group(members) == dist.GroupMember.NON_GROUP_MEMBER
        return None
    with pytest.raises(dist.DistBackendError) as error:
        group = dist.new_group(members, timeout=datetime.timedelta(seconds=limit))
        while True:
            dist.all_reduce(torch.ones(10), group=group)
    return time.monotonic() - start, str(error.value)


def _check_named(outcomes, members, expected, bound=BOUND):
    for rank in set(members) - {VICTIM}:
        seconds, error = outcomes[rank]
        print(f"rank {rank} after {seconds:.2f} s: {error}")
        assert seconds < bound
        assert re.search(expected, error), error
        assert "frame #" not in error and "raised from" not in error and "\n" not in error.strip(), error


def _options(transport):
    return {"enter": PretendHost((0, 1, 1, 0))} if transport == "two hosts" else {"env": TRANSPORTS[transport]}


@pytest.mark.parametrize("moment", ["before", "meanwhile", "joined"])
@pytest.mark.parametrize("transport", [*TRANSPORTS, "two hosts"])
def test_a_member_that_dies_before_a_group_is_made_is_named_long_before_the_timeout(transport, moment):
    everybody, some = [0, 1, 2, 3], [1, 2, 3]
    for members in (everybody, some):
        outcomes = run_ranks(
            _make_group,
            4,
            "farandole",
            may_die={VICTIM},
            members=members,
            moment=moment,
            limit=50,
            **_options(transport),
        )
        name = r"rank 1 \(" if members is everybody else r"rank 0 \(global rank 1, "
        _check_named(outcomes, members, name + r"host [^,]*, pid \d+\) (failed|is gone): its process ")


@pytest.mark.parametrize("transport", [*TRANSPORTS, "two hosts"])
def test_a_member_that_leaves_instead_of_joining_is_named_too(transport):
    members = [1, 2, 3]
    outcomes = run_ranks(
        _make_group,
        4,
        "farandole",
        may_die={VICTIM},
        members=members,
        moment="in order",
        limit=50,
        **_options(transport),
    )
    _check_named(outcomes, members, r"rank 0 \(global rank 1, host [^,]*, pid \d+\) is gone: its process has left")


def _destroy_instead(rank, world_size):
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    if rank == VICTIM:
        dist.destroy_process_group()
        store.wait([f"told {other}" for other in range(world_size) if other != VICTIM])  # its process lives on
        return None
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        dist.new_group(list(range(world_size)), timeout=datetime.timedelta(seconds=50))
    seconds = time.monotonic() - start
    store.set(f"told {rank}", "")
    return seconds, str(error.value)


@pytest.mark.parametrize("transport", [*TRANSPORTS, "two hosts"])
def test_a_member_that_destroys_its_groups_instead_of_joining_is_named_too(transport):
    outcomes = run_ranks(_destroy_instead, 4, "farandole", **_options(transport))
    _check_named(outcomes, range(4), r"rank 1 \(host [^,]*, pid \d+\) is gone: its process has left")


def _come_late(rank, world_size, members):
    dist.barrier()
    if rank == VICTIM or rank not in members:
        await_all(rank, world_size)
        return None
    start = time.monotonic()
    with pytest.raises(dist.DistBackendError) as error:
        dist.new_group(members, timeout=datetime.timedelta(seconds=1))
    seconds = time.monotonic() - start
    await_all(rank, world_size)
    return seconds, str(error.value)


@pytest.mark.parametrize("members", [[0, 1, 2], [1, 2]], ids=str)
def test_a_member_that_is_late_is_a_timeout_that_names_it(members):
    outcomes = run_ranks(_come_late, 3, "farandole", members=members)
    name = "rank 1 of 3" if len(members) == 3 else r"rank 0 \(global rank 1\) of 2"
    # The first one whose time is over tells the others.
    told = r"(rank \d( \(global rank \d\))? has given the group up: )?"
    _check_named(outcomes, members, f"^farandole: {told}{name} did not join the group within 1000 ms$")
    assert max(outcomes[rank][0] for rank in set(members) - {VICTIM}) > 0.99


def _have_no_memory(rank, world_size):
    dist.barrier()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 0:  # what the ranks of the host share cannot be made
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    start = time.monotonic()
    with pytest.raises((dist.DistBackendError, RuntimeError)) as error:
        dist.new_group(list(range(world_size)), timeout=datetime.timedelta(seconds=50))
    seconds = time.monotonic() - start
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    _check_alive(dist.new_group(list(range(world_size))), world_size)
    return seconds, str(error.value)


def _check_alive(group, world_size):
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    assert ones.item() == world_size


def test_a_rank_that_cannot_share_memory_tells_those_who_wait_for_it():
    outcomes = run_ranks(_have_no_memory, 3, "farandole")
    _check_named(outcomes, [0], "sharing memory among the 3 ranks of host .*File too large")
    _check_named(outcomes, [1, 2], "rank 0 has given the group up: .*sharing memory among the 3 ranks of host")


def _init(rank, world_size, folder, moment):
    store = dist.FileStore(os.path.join(folder, "store"), world_size)
    start = time.monotonic()

    def init(seconds):
        dist.init_process_group(
            "farandole", store=store, rank=rank, world_size=world_size, timeout=datetime.timedelta(seconds=seconds)
        )

    if rank == VICTIM:
        threading.Timer(1, os.kill, (os.getpid(), signal.SIGKILL)).start()
    if rank == 2 and moment == "while another one is late":
        time.sleep(3)  # rank 0 is to hear of the death before this one comes
    with pytest.raises(dist.DistBackendError) as error:
        init(50)
        while True:
            dist.all_reduce(torch.ones(10))
    seconds = time.monotonic() - start
    store.set(f"heard {rank}", "")
    store.wait(["heard 0", "heard 2"], datetime.timedelta(seconds=20))
    return seconds, str(error.value)


@pytest.mark.parametrize("moment", ["while another one is late", "when all have come"])
@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 0, 1)], ids=str)
def test_a_rank_that_dies_in_init_process_group_is_named_where_it_had_come(hosts, moment, tmp_path):
    outcomes = run_ranks(
        _init, 3, None, may_die={VICTIM}, enter=PretendHost(hosts), folder=str(tmp_path), moment=moment
    )
    _check_named(outcomes, [0, 2], r"rank 1 \(host [^,]*, pid \d+\) (failed|is gone): its process ")
    if moment == "while another one is late":  # who comes late, or is on another host, is told why by rank 0
        assert outcomes[0][0] < 2.5 < 3 < outcomes[2][0] < 5
        assert "rank 0 has given the group up: " in outcomes[2][1] and "its process died" in outcomes[2][1]


def _come_again(rank, world_size, folder):
    """Ranks 0 and 1 are in two worlds, one after the other, whose rank 2 is process 2, then process 3."""
    number = min(rank, 2)

    def init(world):
        store = dist.FileStore(os.path.join(folder, world), 3)
        dist.init_process_group("farandole", store=store, rank=number, world_size=3)

    if rank != 3:
        init("first")
        dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank != 3:
        with pytest.raises(dist.DistBackendError):
            dist.barrier()
        first = dist.group.WORLD._get_backend(torch.device("cpu"))  # kept: it goes on knowing of the death
        dist.destroy_process_group()
        assert first.size() == 3
    init("second")
    group = dist.new_group([1, 2])
    if number > 0:
        ones = torch.ones(3)
        dist.all_reduce(ones, group=group)
        assert ones.sum() == 6
    dist.destroy_process_group()
    return True


def test_a_death_in_a_world_that_was_left_is_none_in_the_next_one(tmp_path):
    outcomes = run_ranks(_come_again, 4, None, may_die={2}, folder=str(tmp_path))
    assert outcomes == [True, True, None, True]
