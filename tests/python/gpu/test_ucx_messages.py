"""Messages of CUDA tensors over UCX (FARANDOLE_CUDA_MESSAGES=ucx), also between ranks that NCCL would not let share a GPU."""

import os
import random
import signal
import time

import pytest
import torch
import torch.distributed as dist

from farandole.bench._gpus import Placement
from gpu.data import MOVED, SIZES, part, same_bits
from support.gpus import needs_gpu, run_on_gpus
from support.processes import await_all

pytestmark = [needs_gpu, pytest.mark.timeout(200)]
SETTING = {"FARANDOLE_CUDA_MESSAGES": "ucx"}
LARGE = 1 << 24
CYCLES = 500_000_000  # of a kernel that sleeps: a few tenths of a second
VICTIM = 1


def _placement():
    """Two ranks on one GPU with no leave of NCCL's, which has no part in this; else a rank for each GPU."""
    gpus = torch.cuda.device_count()
    return Placement(min(gpus, 4)) if gpus > 1 else Placement(2, "UCX alone")


@pytest.fixture
def ranks(record_property):
    placement = _placement()
    record_property("placement", str(placement))
    return placement


def _run(fn, placement, **kwargs):
    return run_on_gpus(fn, placement, env=SETTING, **kwargs)


def _ring(rank, world_size):
    following, previous = (rank + 1) % world_size, (rank - 1) % world_size
    for seed, dtype in enumerate(MOVED):
        outgoing = [part(seed, rank, numel, dtype).cuda() for numel in SIZES]
        incoming = [part(seed, 77, numel, dtype).cuda() for numel in SIZES]
        ops = [dist.P2POp(dist.isend, x, following, tag=tag) for tag, x in enumerate(outgoing)]
        ops += [dist.P2POp(dist.irecv, x, previous, tag=tag) for tag, x in enumerate(incoming)]
        random.Random(10 * seed + rank).shuffle(ops)
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        for numel, x in zip(SIZES, incoming):
            assert same_bits(x, part(seed, previous, numel, dtype)), f"{dtype}, {numel} elements"


def test_a_batch_passes_every_dtype_around_a_ring_by_tags(ranks):
    _run(_ring, ranks)


def _early_memory(rank, world_size, store):
    """Of before UCX was there: its cache of what memory is whose must not be asked."""
    early = torch.full((LARGE,), float(rank), device="cuda")
    small = torch.full((5,), float(rank), device="cuda")
    dist.init_process_group("farandole", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size)
    results = []
    for mine in (early, small):
        incoming = torch.empty_like(mine)
        receiving = dist.irecv(incoming, (rank - 1) % world_size)
        dist.isend(mine, (rank + 1) % world_size).wait()
        receiving.wait()
        results.append((incoming.min().item(), incoming.max().item()))
    await_all(rank, world_size)
    dist.destroy_process_group()
    return results


def test_memory_that_is_older_than_the_group_is_sent(ranks, tmp_path):
    for rank, got in enumerate(_run(_early_memory, ranks, backend=None, store=str(tmp_path / "store"))):
        previous = float((rank - 1) % ranks.size)
        assert got == [(previous, previous)] * 2


def _mixed(rank, world_size):
    peer = (rank + 1) % world_size
    before = (rank - 1) % world_size
    for round_ in range(20):
        sent = [
            torch.full((1000 + round_,), float(rank + i), device=device) for i, device in enumerate(["cpu", "cuda"])
        ]
        got = [torch.zeros_like(x) for x in sent]
        ops = [dist.P2POp(dist.isend, x, peer) for x in sent] + [dist.P2POp(dist.irecv, x, before) for x in got]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert [x.unique().tolist() for x in got] == [[float(before + i)] for i in range(2)], round_


def test_a_batch_has_tensors_on_the_cpu_and_on_cuda(ranks):
    _run(_mixed, ranks)


def _behind_slow_kernels(rank, world_size):
    for numel in (10, LARGE):
        sent, got = torch.zeros(numel, device="cuda"), torch.zeros(numel, device="cuda")
        torch.cuda.synchronize()
        start = time.monotonic()
        torch.cuda._sleep(CYCLES)
        sent.fill_(rank + 1)
        got.fill_(-1)  # before the message, which it would lie over
        receiving = dist.irecv(got, (rank - 1) % world_size)
        sending = dist.isend(sent, (rank + 1) % world_size)
        issued = time.monotonic() - start
        receiving.wait()
        done = time.monotonic() - start
        sending.wait()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):  # wait() has ended it for every stream
            total = got.double().sum()
        side.synchronize()
        assert total.item() == numel * float((rank - 1) % world_size + 1)
        assert issued < done / 2, (issued, done)


def test_messages_come_after_what_is_on_the_stream_and_do_not_block_the_host(ranks):
    _run(_behind_slow_kernels, ranks)


def _future(rank, world_size):
    got = torch.zeros(1000, device="cuda")
    doubled = dist.irecv(got, (rank - 1) % world_size).get_future().then(lambda done: done.value()[0] * 2)
    dist.isend(torch.full((1000,), float(rank), device="cuda"), (rank + 1) % world_size).wait()
    return doubled.wait().mean().item()


def test_a_future_holds_what_was_received(ranks):
    expected = [2.0 * ((rank - 1) % ranks.size) for rank in range(ranks.size)]
    assert _run(_future, ranks) == expected


def _refusals(rank, world_size):
    x = torch.ones(8, device="cuda")
    if rank == 0:
        dist.send(x, 1)
    elif rank == 1:
        with pytest.raises(ValueError, match=r"Float.*Int|Int.*Float"):
            dist.recv(x.int(), 0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    error = ""
    try:
        with torch.cuda.graph(graph):
            x += 1  # a graph of nothing is another error
            try:
                dist.isend(x, (rank + 1) % world_size)
            except ValueError as refusal:
                error = str(refusal)
    except RuntimeError as broken:  # the capture, by what the refusal left undone
        error += str(broken)
    await_all(rank, world_size)
    return error


def test_another_dtype_and_a_capture_are_refused(ranks):
    for error in _run(_refusals, ranks):
        assert "captured in a graph" in error and "FARANDOLE_CUDA_MESSAGES" in error, error


def _survive(rank, world_size):
    for numel in (10, LARGE):
        got = torch.zeros(numel, device="cuda")
        receiving = dist.irecv(got, (rank - 1) % world_size)
        dist.isend(torch.ones(numel, device="cuda"), (rank + 1) % world_size).wait()
        receiving.wait()
    await_all(rank, world_size)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    messages = []
    for operation in (dist.irecv, dist.isend):
        with pytest.raises(RuntimeError) as error:
            operation(torch.zeros(LARGE, device="cuda"), VICTIM).wait()
        messages.append(str(error.value))
    torch.cuda.synchronize()  # the device itself goes on
    return time.monotonic() - start, messages


def test_a_killed_rank_is_named_to_who_waits_for_it(ranks, record_property):
    for rank, outcome in enumerate(_run(_survive, ranks, may_die={VICTIM})):
        if rank != VICTIM:
            seconds, messages = outcome
            record_property(f"rank {rank} fails after, seconds", round(seconds, 3))
            assert seconds < 20
            assert all(f"rank {VICTIM} " in message for message in messages), messages
