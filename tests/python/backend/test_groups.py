"""Several groups, and the process around them."""

import copy
import datetime
import gc
import inspect
import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from farandole import _C
from support.devices import only_on_cpu
from support.processes import run_ranks
from support.sanitizers import SANITIZED
from support.torch_features import SPLITS_GROUPS, prepare_to_split


def _subgroups(rank, world_size):
    evens = dist.new_group([0, 2])
    odds = dist.new_group([1, 3])
    mine = evens if rank % 2 == 0 else odds
    x = torch.full((2,), float(rank))
    dist.all_reduce(x, group=mine)
    assert x.tolist() == [2.0 if rank % 2 == 0 else 4.0] * 2
    peer = (rank + 2) % 4
    into = torch.zeros(1)
    # The same tag in both groups at once: messages do not cross.
    works = [dist.isend(torch.tensor([1.0]), peer, group=mine, tag=5), dist.isend(torch.tensor([2.0]), peer, tag=5)]
    dist.recv(into, peer, tag=5)
    assert into.item() == 2.0
    dist.recv(into, peer, group=mine, tag=5)
    assert into.item() == 1.0
    for work in works:
        work.wait()
    return True


def test_groups_do_not_see_each_others_messages():
    assert all(run_ranks(_subgroups, 4, "farandole"))


def _any_source(rank, world_size):
    if rank == 0:
        seen = set()
        for tag in (1, 2):
            for _ in range(world_size - 1):
                x = torch.zeros(1)
                source = dist.recv(x, tag=tag)
                assert x.item() == source * 10 + tag
                seen.add((source, tag))
        return len(seen) == 2 * (world_size - 1)
    for tag in (2, 1):
        dist.isend(torch.tensor([float(rank * 10 + tag)]), 0, tag=tag).wait()
    return True


@only_on_cpu("NCCL has no receive from any rank")
def test_receive_from_any_source_honours_the_tag_and_names_the_source():
    assert all(run_ranks(_any_source, 4, "farandole"))


def _threads(rank, world_size):
    groups = [dist.new_group() for _ in range(4)]
    failures = []

    def work(index):
        try:
            for i in range(200):
                x = torch.full((50,), float(rank + index))
                dist.all_reduce(x, group=groups[index])
                assert x[0] == sum(range(world_size)) + index * world_size, (i, x[0])
        except BaseException as error:
            failures.append(repr(error))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failures


@only_on_cpu("NCCL wants its groups used in one order on all ranks")
def test_groups_are_used_by_several_threads_at_once():
    assert run_ranks(_threads, 2, "farandole", timeout=90) == [[], []]


def _members(group, members, rank, seed, failures):
    """One thread's work in one group: collectives and messages, small and large."""
    try:
        me, size = members.index(rank), len(members)
        for i in range(40):
            numel = 300_000 if (seed + i) % 13 == 0 else 50
            x = torch.full((numel,), float(rank + seed + i))
            dist.all_reduce(x, group=group)
            assert torch.all(x == sum(members) + size * (seed + i)), (seed, i)
            into = torch.empty(numel)
            work = dist.isend(x + me, group=group, group_dst=(me + 1) % size, tag=i % 3)
            dist.recv(into, group=group, group_src=(me - 1) % size, tag=i % 3)
            assert torch.all(into == x + (me - 1) % size), (seed, i)
            work.wait()
            parts = torch.empty(numel * size)
            dist.all_gather_into_tensor(parts, x + me, group=group)
            assert all(torch.all(part == x[0] + r) for r, part in enumerate(parts.chunk(size))), (seed, i)
    except BaseException as error:
        failures.append(f"group {members}: {error!r}")


def _group_per_thread(rank, world_size):
    lists = [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1], [2, 3], [0, 2, 3], [1, 2], [0, 3]]  # overlapping and disjoint
    groups = [(members, dist.new_group(members)) for members in lists]
    failures: list[str] = []
    threads = [
        threading.Thread(target=_members, args=(group, members, rank, seed, failures))
        for seed, (members, group) in enumerate(groups)
        if rank in members
    ]
    for thread in threads:
        thread.start()
    # c10d allows new groups while others work; their ranks meet in the store.
    for number in range(4):
        members = [[0, 1, 2, 3], [1, 3], [0, 2], [0, 1, 2]][number]
        group = dist.new_group(members)
        if rank in members:
            _members(group, members, rank, 100 + number, failures)
    for thread in threads:
        thread.join()
    return failures


@only_on_cpu("NCCL wants its groups used in one order on all ranks")
def test_groups_that_overlap_work_in_threads_of_their_own_while_others_are_made():
    assert run_ranks(_group_per_thread, 4, "farandole", timeout=90) == [[]] * 4


def _two_batches(rank, world_size):
    peer, group = 1 - rank, dist.group.WORLD
    device = torch.device("cpu")
    into, errors = torch.zeros(1), []
    group._start_coalescing(device)

    def other():
        ops = [dist.P2POp(dist.isend, torch.ones(1), peer), dist.P2POp(dist.irecv, torch.zeros(1), peer)]
        try:
            dist.batch_isend_irecv(ops)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    # The first one goes on.
    group.send([torch.full((1,), float(rank))], peer, 0)
    group.recv([into], peer, 0)
    group._end_coalescing(device).wait()
    assert into.item() == peer
    return errors


def test_a_second_thread_that_batches_on_a_group_is_told_to_take_its_own():
    expected = "another thread has a batch open on this group; expected one at a time, or a group per thread"
    for errors in run_ranks(_two_batches, 2, "farandole"):
        assert len(errors) == 1 and expected in errors[0], errors


def _split(rank, world_size):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.supports_splitting
    prepare_to_split()
    results = []
    for parts in ([[0, 1], [2, 3]], [[3, 0], [1, 2]], [[0, 1], [2, 3]]):
        half = dist.split_group(split_ranks=parts, timeout=datetime.timedelta(seconds=31))
        x = torch.full((1,), float(rank))
        dist.all_reduce(x, group=half)
        results.append(x.item())
        child = half._get_backend(torch.device("cpu"))
        assert child.options._timeout == datetime.timedelta(seconds=31)
    # What torch writes into the options of a child stays out of the parent's.
    assert backend.options._timeout == datetime.timedelta(seconds=60)
    return results


@only_on_cpu("tests/python/gpu/test_groups has it on GPUs")
@pytest.mark.skipif(not SPLITS_GROUPS, reason=f"torch {torch.__version__} splits no group without a GPU")
def test_split_gives_each_part_a_group():
    assert run_ranks(_split, 4, "farandole") == [[1, 3, 1], [1, 3, 1], [5, 3, 5], [5, 3, 5]]


def _merge(rank, world_size, folder):
    # Two groups that know nothing of each other, then one of all.
    half = rank // 2
    store = dist.FileStore(os.path.join(folder, f"half{half}"), 2)
    dist.init_process_group("farandole", store=store, rank=rank % 2, world_size=2)
    together = dist.FileStore(os.path.join(folder, "together"), 4)
    merged = dist.group.WORLD.merge_remote_group(together, 4, datetime.timedelta(seconds=30), "merged")
    x = torch.full((1,), float(rank))
    merged.allreduce([x]).wait()
    y = torch.full((1,), float(rank))
    dist.all_reduce(y)
    ranks = merged.rank(), merged.size()
    merged.shutdown()
    dist.destroy_process_group()
    return x.item(), y.item(), ranks


def test_merge_makes_one_group_of_two(tmp_path):
    results = run_ranks(_merge, 4, None, folder=str(tmp_path))
    assert [r[:2] for r in results] == [(6.0, 1.0), (6.0, 1.0), (6.0, 5.0), (6.0, 5.0)]
    assert sorted(r[2] for r in results) == [(i, 4) for i in range(4)]


def _shrink(rank, world_size):
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert backend.supports_shrinking
    if rank == 1:
        return None
    with pytest.raises(ValueError, match=r"ranks_to_exclude is 9; expected a rank from 0 to 3"):
        backend.shrink([9])
    smaller = backend.shrink([1])
    x = torch.full((1,), float(rank))
    smaller.allreduce([x]).wait()
    result = smaller.rank(), smaller.size(), x.item()
    smaller.shutdown()
    return result


@only_on_cpu("tests/python/gpu/test_groups has it on GPUs")
def test_shrink_makes_a_group_without_the_excluded_ranks():
    assert run_ranks(_shrink, 4, "farandole") == [(0, 3, 5.0), None, (1, 3, 5.0), (2, 3, 5.0)]


def _shrink_world(rank, world_size):
    x = torch.full((1,), float(rank))
    dist.all_reduce(x)
    if rank == 1:
        return None
    smaller = dist.shrink_group([1])
    assert dist.get_world_size() == 3  # it is the default group now
    y, into = torch.full((1000,), float(rank)), torch.zeros(1)
    dist.all_reduce(y)
    dist.all_reduce(y, group=smaller)
    me = dist.get_rank()
    work = dist.isend(torch.tensor([float(rank)]), (me + 1) % 3)
    dist.recv(into, (me - 1) % 3)
    work.wait()
    return x.item(), y[0].item(), me, into.item()


@only_on_cpu("tests/python/gpu/test_groups has shrink() on GPUs")
@pytest.mark.skipif(not hasattr(dist, "shrink_group"), reason="this torch has no shrink_group")
def test_the_default_group_is_shrunk_by_torch():
    results = run_ranks(_shrink_world, 4, "farandole")
    assert results == [(6.0, 15.0, 0, 3.0), None, (6.0, 15.0, 1, 0.0), (6.0, 15.0, 2, 2.0)]


def _options(rank, world_size):
    import farandole

    options = farandole._C.ProcessGroupFarandole.Options(timeout=datetime.timedelta(seconds=5))
    assert copy.deepcopy(options)._timeout == copy.copy(options)._timeout == datetime.timedelta(seconds=5)
    group = dist.new_group(pg_options=options, timeout=datetime.timedelta(seconds=41))
    backend = group._get_backend(torch.device("cpu"))
    assert backend.options._timeout == datetime.timedelta(seconds=41)  # as with NCCL the call's wins
    backend.set_timeout(datetime.timedelta(seconds=42))
    assert backend.options._timeout == datetime.timedelta(seconds=42)
    assert backend.options.backend == "farandole"
    with pytest.raises(ValueError, match=r"pg_options is 'fast'; expected None or ProcessGroupFarandole.Options"):
        dist.new_group(pg_options="fast")
    if "enable_reconfigure" in inspect.signature(dist.init_process_group).parameters:  # from torch 2.15 on
        asked = torch._C._distributed_c10d._DistributedBackendOptions()
        asked.enable_reconfigure = True
        with pytest.raises(NotImplementedError, match="enable_reconfigure=True: expected False"):
            farandole.create_backend(asked)
    return True


@only_on_cpu("options are a group's, whatever its tensors")
def test_options_are_taken_copied_and_show_the_timeout_in_force():
    assert all(run_ranks(_options, 2, "farandole"))


def _caught_signals(rank, world_size):
    dist.all_reduce(torch.zeros(1))
    with open("/proc/self/status") as status:
        return next(int(line.split()[1], 16) for line in status if line.startswith("SigCgt"))


@only_on_cpu("CUDA may have handlers of its own")
@pytest.mark.skipif(SANITIZED, reason="the sanitizers have handlers of their own")
def test_no_signal_handler_is_installed_behind_the_users_back():
    bits = [1 << (s - 1) for s in (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGHUP)]
    for caught in run_ranks(_caught_signals, 2, "farandole"):
        assert not caught & sum(bits), hex(caught)


def _forks(rank, world_size):
    child = os.fork()
    if child == 0:  # as a data loader's worker: leaves by the interpreter's normal end
        dist.destroy_process_group()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    x = torch.ones(1)
    dist.all_reduce(x)
    return status, x.item()


@only_on_cpu("CUDA does not live on in a child")
def test_a_forked_child_that_destroys_the_group_neither_hangs_nor_harms():
    assert run_ranks(_forks, 2, "farandole") == [(0, 2.0)] * 2


ONLY_FOR_THE_CPU = pytest.param("cpu:farandole", marks=only_on_cpu("this group takes no tensors on a GPU"))


@pytest.mark.parametrize("backend", ["farandole", ONLY_FOR_THE_CPU, "cpu:farandole,cuda:farandole"])
def test_the_backend_is_found_by_name(backend):
    assert run_ranks(_sum, 2, backend) == [1.0, 1.0]


def _sum(rank, world_size):
    x = torch.full((1,), float(rank))
    dist.all_reduce(x)
    return x.item()


def _leave_a_message(rank, world_size):
    """What was sent to a group that is gone, and never received, is none of the next group's."""
    for _ in range(3):
        group = dist.new_group([0, 1])
        if rank == 0:
            dist.send(torch.full((1,), 7.0), 1, group=group)
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        gc.collect()
        dist.barrier()
        group = dist.new_group([0, 1])
        came = torch.zeros(1)
        dist.send(torch.full((1,), 8.0), 1, group=group) if rank == 0 else dist.recv(came, 0, group=group)
        assert rank == 0 or came.item() == 8
        dist.barrier()
        dist.destroy_process_group(group)


@only_on_cpu("over NCCL a send waits for its receive")
@pytest.mark.parametrize("transport", ["auto", "ucx"])
def test_messages_of_a_group_that_is_gone_are_not_the_next_ones(transport):
    run_ranks(_leave_a_message, 2, "farandole", env={"FARANDOLE_TRANSPORT": transport})


def _come_round(rank, world_size):
    """Numbers of groups are used again after 2048 groups."""
    group = dist.new_group([0, 1])
    small, large = torch.full((1,), 7.0), torch.full((100_000,), 7.0)
    if rank == 0:
        dist.send(small, 1, group=group)
        work = dist.isend(large, 1, group=group)
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    gc.collect()
    if rank == 1:
        options = c10d._DistributedBackendOptions()
        options.group_rank, options.group_size = 0, 1
        for _ in range(2046):  # and the world has one
            options.store = dist.HashStore()
            _C.create_backend(options)
    dist.barrier()
    group = dist.new_group([0, 1])
    for expected in (torch.full((1,), 8.0), torch.full((100_000,), 8.0)):
        came = torch.zeros_like(expected)
        dist.send(expected, 1, group=group) if rank == 0 else dist.recv(came, 0, group=group)
        assert rank == 0 or torch.equal(came, expected)
    return rank == 1 or work.is_completed()


@only_on_cpu("over NCCL a send waits for its receive")
@pytest.mark.parametrize("transport", ["auto", "ucx"])
def test_messages_of_a_group_that_is_gone_are_nobodys_when_its_number_comes_again(transport):
    assert all(run_ranks(_come_round, 2, "farandole", env={"FARANDOLE_TRANSPORT": transport}, timeout=60))
