"""Streams, events, memory and graphs: as with ProcessGroupNCCL, nothing waits that need not, and nothing is too early."""

import time

import pytest
import torch
import torch.distributed as dist

from farandole.bench._gpus import sleep_cycles
from support.gpus import needs_gpu, run_on_gpus

pytestmark = [needs_gpu, pytest.mark.timeout(200)]
NUMEL = 1 << 20
LATE = 1 << 26
SLOW = 0.3  # seconds


def _warm(world_size):
    """Makes the communicators and loads the kernels, for which CUDA may wait, so that what follows is only issued."""
    x = torch.ones(8, device="cuda")
    dist.all_reduce(x)
    y = torch.zeros(NUMEL, device="cuda").fill_(1) * 2
    torch.cuda.synchronize()
    assert x.tolist() == [world_size] * 8 and y[0] == 2
    return sleep_cycles(SLOW)


def _behind_a_slow_kernel(rank, world_size):
    cycles = _warm(world_size)
    side = torch.cuda.Stream()
    x = torch.zeros(NUMEL, device="cuda")
    torch.cuda.synchronize()
    start = time.monotonic()
    with torch.cuda.stream(side):
        torch.cuda._sleep(cycles)
        x.fill_(rank + 1)
        dist.all_reduce(x)
        y = x * 2
    issued = time.monotonic() - start
    side.synchronize()
    done = time.monotonic() - start
    assert torch.equal(y, torch.full_like(y, world_size * (world_size + 1)))
    return issued, done


def test_a_collective_sees_what_its_stream_computes_before_it_and_does_not_block_the_host(world, record_property):
    for issued, done in run_on_gpus(_behind_a_slow_kernel, world):
        record_property("issued in, seconds", round(issued, 6))
        assert issued < done / 2
        assert done > SLOW / 4  # whatever its clock did


def _wait_on_another_stream(rank, world_size):
    cycles = _warm(world_size)
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    x = torch.zeros(NUMEL, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(first):
        torch.cuda._sleep(cycles)
        x.fill_(rank + 1)
        work = dist.all_reduce(x, async_op=True)
    early = work.is_completed()
    start = time.monotonic()
    with torch.cuda.stream(second):
        work.wait()
        y = x * 2
    waited = time.monotonic() - start
    second.synchronize()
    assert torch.equal(y, torch.full_like(y, world_size * (world_size + 1)))
    deadline = time.monotonic() + 10
    while not work.is_completed() and time.monotonic() < deadline:
        time.sleep(0.001)
    return early, waited, work.is_completed()


def test_a_work_orders_the_stream_that_waits_for_it_and_completes_when_the_device_has_done_it(world):
    for early, waited, completed in run_on_gpus(_wait_on_another_stream, world):
        assert not early and completed
        assert waited < SLOW / 2


def _future(rank, world_size):
    cycles = _warm(world_size)
    x = torch.zeros(NUMEL, device="cuda")
    torch.cuda._sleep(cycles)
    x.fill_(rank + 1)
    future = dist.all_reduce(x, async_op=True).get_future()
    doubled = future.then(lambda done: done.value()[0] * 2)
    start = time.monotonic()
    y = doubled.wait() + 1
    waited = time.monotonic() - start
    total = world_size * (world_size + 1) // 2
    assert torch.equal(y, torch.full_like(y, 2 * total + 1))
    return waited


def test_a_callback_of_a_future_computes_behind_the_collective(world):
    for waited in run_on_gpus(_future, world):
        assert waited < SLOW / 2


def _result(rank, world_size):
    cycles = _warm(world_size)
    x = torch.zeros(NUMEL, device="cuda")
    torch.cuda._sleep(cycles)
    x.fill_(rank + 1)
    result = dist.all_reduce(x, async_op=True).get_future_result()
    early = result.done()
    assert result.wait() == 0  # WorkResult.SUCCESS
    # The device has done it, and nothing on the host's side has waited for that stream.
    total = world_size * (world_size + 1) // 2
    return early, bool((x == total).all())


def test_the_result_of_a_work_is_told_once_the_device_has_done_it(world):
    for early, is_right in run_on_gpus(_result, world):
        assert not early and is_right


def _freed_at_once(rank, world_size):
    _warm(world_size)
    large = torch.ones(LATE, device="cuda")  # 256 MiB: the collectives behind it are late
    gathered = torch.empty(LATE * world_size, device="cuda")
    for round_ in range(5):
        outputs, works = [], [dist.all_gather_into_tensor(gathered, large, async_op=True)]
        for index in range(8):
            value = float(round_ + index + rank)
            output = torch.empty(NUMEL * world_size, device="cuda")
            gives = torch.full((NUMEL,), value, device="cuda")
            works.append(dist.all_gather_into_tensor(output, gives, async_op=True))
            outputs.append(output)
            del gives
            torch.full((NUMEL,), -1.0, device="cuda")  # would be laid over it
        for work in works:
            work.wait()
        for index, output in enumerate(outputs):
            for sender, block in enumerate(output.chunk(world_size)):
                assert torch.equal(block, torch.full_like(block, float(round_ + index + sender))), (round_, index)


def test_memory_that_is_freed_after_the_issue_is_not_reused_before_the_end(world):
    run_on_gpus(_freed_at_once, world)


def _on_a_side_stream(rank, world_size):
    """The same where the tensors belong to another stream than the one that waits."""
    _warm(world_size)
    side = torch.cuda.Stream()
    for round_ in range(20):
        with torch.cuda.stream(side):
            x = torch.full((NUMEL,), float(rank + 1), device="cuda")
            work = dist.all_reduce(x, async_op=True)
        work.wait()
        y = x * 1
        x.record_stream(torch.cuda.current_stream())
        del x, work
        with torch.cuda.stream(side):
            torch.full((NUMEL,), -1.0, device="cuda")
        assert torch.equal(y, torch.full_like(y, world_size * (world_size + 1) / 2)), round_


def test_tensors_of_another_stream_are_kept_as_long(world):
    run_on_gpus(_on_a_side_stream, world)


def _memory_after(rank, world_size):
    _warm(world_size)
    before = torch.cuda.memory_allocated()
    for index in range(50):
        x = torch.ones(NUMEL, device="cuda")
        if index % 2:
            dist.all_reduce(x)
        else:
            dist.all_reduce(x, async_op=True)  # nobody waits for it
        del x
    torch.cuda.synchronize()
    deadline = time.monotonic() + 10
    while torch.cuda.memory_allocated() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    return torch.cuda.memory_allocated() - before


def test_finished_operations_hold_no_memory_also_when_nobody_waited(world):
    for held in run_on_gpus(_memory_after, world):
        assert held <= 0


def _graph(rank, world_size):
    _warm(world_size)
    x = torch.ones(NUMEL, device="cuda")
    total = torch.zeros(NUMEL, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        dist.all_reduce(x)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.fill_(rank + 1)
        dist.all_reduce(x)
        x.mul_(2)
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        total.add_(x)
    torch.cuda.synchronize()
    del work
    for replay in range(1, 4):
        graph.replay()
        torch.cuda.synchronize()
        expected = replay * 2 * world_size * world_size * (world_size + 1) / 2
        assert torch.equal(total, torch.full_like(total, expected)), replay
    dist.all_reduce(x.fill_(1.0))  # beside the graph, as before
    assert torch.equal(x, torch.full_like(x, world_size)), x.unique(return_counts=True)
    del graph


def test_collectives_are_captured_in_a_graph_and_replayed(world):
    run_on_gpus(_graph, world)


def _in_a_graph_beside_others(rank, world_size):
    """What is pending when a capture begins neither breaks it nor is broken."""
    cycles = _warm(world_size)
    x, y = torch.ones(NUMEL, device="cuda"), torch.full((NUMEL,), float(rank + 1), device="cuda")
    side, capturing = torch.cuda.Stream(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(cycles)
        pending = dist.all_reduce(y, async_op=True)
    with torch.cuda.stream(capturing):  # torch.cuda.graph would wait for what is pending
        graph.capture_begin()
        dist.all_reduce(x)
        time.sleep(SLOW / 2)  # who looks after pending operations looks meanwhile
        graph.capture_end()
    pending.wait()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, torch.full_like(y, world_size * (world_size + 1) / 2))
    assert torch.equal(x, torch.full_like(x, world_size))


def test_an_operation_that_is_pending_when_a_capture_begins_goes_on(world):
    run_on_gpus(_in_a_graph_beside_others, world)


def _inference(rank, world_size):
    with torch.inference_mode():
        x = torch.ones(100, device="cuda")
        dist.all_reduce(x)
        return x.sum().item()


def test_tensors_of_inference_mode_are_reduced_too(world):
    assert run_on_gpus(_inference, world) == [100.0 * world.size] * world.size
