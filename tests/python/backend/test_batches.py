"""Batches of sends and receives, over real processes and the real transport."""

import datetime
import time

import pytest
import torch
import torch.distributed as dist

from backend.exchanges import halves_of, random_exchange
from support.devices import ON_CPU, only_on_cpu
from support.processes import RankFailed, run_ranks

# On GPUs a batch whose tags do not ascend is held up until the other end has told its order.
BATCHES = 10_000 if ON_CPU else 200
MESSAGES = 10_000 if ON_CPU else 500


def _tensors(halves):
    return [
        torch.full((t.numel,), t.ident, dtype=torch.int32) if is_send else torch.full((t.numel,), -1, dtype=torch.int32)
        for is_send, t in halves
    ]


def _check(halves, tensors, where):
    for (is_send, t), tensor in zip(halves, tensors):
        assert is_send or torch.equal(tensor, torch.full_like(tensor, t.ident)), f"{where}: {t} got {tensor[:4]}"


def _run_batches(rank, world_size, first_seed, count, large=2):
    for seed in range(first_seed, first_seed + count):
        halves = halves_of(rank, random_exchange(seed, world_size, large=large), order_seed=seed * 1000 + rank)
        tensors = _tensors(halves)
        if not halves:
            continue
        ops = [
            dist.P2POp(dist.isend, x, t.target, tag=t.tag) if s else dist.P2POp(dist.irecv, x, t.source, tag=t.tag)
            for (s, t), x in zip(halves, tensors)
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        _check(halves, tensors, f"seed {seed} rank {rank}")
    return count


def test_random_batches_listed_in_random_orders_arrive():
    assert run_ranks(_run_batches, 4, "farandole", timeout=240, first_seed=1, count=BATCHES) == [BATCHES] * 4


def _run_naively(rank, world_size, seed):
    halves = halves_of(rank, random_exchange(seed, world_size, large=100), order_seed=seed * 1000 + rank)
    for (is_send, t), x in zip(halves, _tensors(halves)):
        if t.source == t.target:
            continue  # a blocking send to oneself can never be right
        work = dist.isend(x, t.target, tag=t.tag) if is_send else dist.irecv(x, t.source, tag=t.tag)
        work.wait(datetime.timedelta(seconds=2))


@only_on_cpu("on a GPU no host waits for a message")
def test_the_same_lists_issued_one_by_one_deadlock_where_the_batch_does_not():
    """Blocking operations in list order, messages large enough for rendezvous."""
    seed = 1
    with pytest.raises(RankFailed, match="not done after its timeout of 2000 ms"):
        for seed in range(1, 10):
            run_ranks(_run_naively, 4, "farandole", timeout=30, seed=seed)
    run_ranks(_run_batches, 4, "farandole", first_seed=seed, count=1, large=100)


def _batch_p2p(rank, world_size):
    import farandole

    assert farandole.batch_p2p([], "nothing") == {}
    peers = [r for r in range(world_size) if r != rank]
    inputs = {p: torch.full((4,), float(rank * 10 + p)) for p in peers}
    outputs = {p: torch.zeros(4) for p in peers}
    ops = [dist.P2POp(dist.isend, inputs[p], p) for p in peers]
    ops += [dist.P2POp(dist.irecv, outputs[p], p) for p in reversed(peers)]
    works = farandole.batch_p2p(ops, "all pairs")
    assert sorted(works) == peers
    for peer in reversed(peers):  # any one alone
        works[peer].wait()
        assert outputs[peer].tolist() == [float(peer * 10 + rank)] * 4
        assert works[peer].is_completed() and works[peer].is_success()
    return True


def test_batch_p2p_gives_a_work_for_each_peer():
    assert run_ranks(_batch_p2p, 3, "farandole") == [True] * 3


def _some_ranks_only(rank, world_size):
    x = torch.full((2,), float(rank))
    if rank < 2:
        op = dist.P2POp(dist.isend, x, 1) if rank == 0 else dist.P2POp(dist.irecv, x, 0)
        for work in dist.batch_isend_irecv([op]):
            work.wait()
    dist.all_reduce(x)
    return x.tolist()


def test_a_batch_of_some_ranks_does_not_set_collectives_apart():
    assert run_ranks(_some_ranks_only, 3, "farandole") == [[2.0, 2.0]] * 3


def _labelled_failure(rank, world_size):
    import farandole

    if rank == 0:
        x = torch.zeros(2)
        work = farandole.batch_p2p([dist.P2POp(dist.irecv, x, 1, tag=4)], "warm-up of step 7")[1]
        with pytest.raises(RuntimeError, match=r"recv from rank 1 .*tag 4.*batch 'warm-up of step 7'.*not done after"):
            work.wait(datetime.timedelta(milliseconds=100))
    dist.barrier()
    return True


@only_on_cpu("over NCCL no message is given up alone")
def test_the_label_of_a_batch_is_in_its_errors():
    assert run_ranks(_labelled_failure, 2, "farandole") == [True] * 2


def _profiled(rank, world_size):
    import farandole

    x = torch.zeros(2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        op = dist.P2POp(dist.isend, x, 1) if rank == 0 else dist.P2POp(dist.irecv, x, 0)
        for work in farandole.batch_p2p([op], "seen").values():
            work.wait()
    return [event.name for event in profile.events()]


def test_the_label_of_a_batch_is_in_profiles():
    for names in run_ranks(_profiled, 2, "farandole"):
        assert "farandole:batch_p2p seen" in names


def _error_inside(rank, world_size):
    good = torch.full((3,), float(rank))
    into = torch.zeros(3)
    peer = 1 - rank
    for _ in range(3):
        with pytest.raises(ValueError, match="contiguous"):
            dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, good, peer), dist.P2POp(dist.irecv, torch.zeros(4, 4).t(), peer)]
            )
        for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, good, peer), dist.P2POp(dist.irecv, into, peer)]):
            work.wait()
        assert into.tolist() == [float(peer)] * 3
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        backend._start_coalescing()
        refused = "any rank inside a batch" if ON_CPU else "expected a rank for a tensor on CUDA"
        with pytest.raises(ValueError, match=refused):
            backend.recv_anysource([into], 0)
        if rank == 0:
            dist.send(good, 1)
        else:
            dist.recv(into, 0)
    return True


def test_an_error_inside_a_batch_leaves_the_group_usable():
    assert run_ranks(_error_inside, 2, "farandole") == [True] * 2


def _all_complete_unwaited(works, seconds=60):
    deadline = time.monotonic() + seconds
    while not all(work.is_completed() for work in works) and time.monotonic() < deadline:
        time.sleep(0.01)
    return all(work.is_completed() for work in works)


def _nobody_waits(rank, world_size):
    count = MESSAGES
    if rank == 0:
        sent = [dist.isend(torch.tensor([i]), 1, tag=i % 7) for i in range(count)]
        assert _all_complete_unwaited(sent)
    else:
        time.sleep(0.3)
        into = [torch.zeros(1, dtype=torch.int64) for _ in range(count)]
        for i in range(count):
            dist.recv(into[i], 0, tag=i % 7)
        assert [int(x) for x in into] == list(range(count))
    return True


def test_many_messages_arrive_though_the_sender_never_waits():
    assert run_ranks(_nobody_waits, 2, "farandole", timeout=120) == [True] * 2


def _large_nobody_waits(rank, world_size):
    count, numel = 60, 300_000  # rendezvous: the sender must act again after posting
    if rank == 0:
        sent = [dist.isend(torch.full((numel,), float(i)), 1) for i in range(count)]
        assert _all_complete_unwaited(sent)
    else:
        time.sleep(0.3)
        into = torch.empty(numel)
        for i in range(count):
            dist.recv(into, 0)
            assert into[0] == i and into[-1] == i
    return True


def test_large_messages_arrive_though_the_sender_never_waits():
    assert run_ranks(_large_nobody_waits, 2, "farandole", timeout=120) == [True] * 2
