"""Misuse and failures: one clear error, and the group usable afterwards."""

import datetime
import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.processes import await_all, run_ranks

pytestmark = only_on_cpu("tests/python/gpu/test_errors has it on GPUs")


def _still_works(rank, world_size):
    x = torch.ones(4)
    dist.all_reduce(x)
    assert x.tolist() == [float(world_size)] * 4


def _misuse(rank, world_size):
    x = torch.zeros(4)
    before = datetime.timedelta(seconds=-3)
    hurried = dist.AllreduceOptions()
    hurried.timeout = before
    cases = [
        (ValueError, r"broadcast: tensor has layout Sparse; expected a dense",
         lambda: backend.broadcast([x.to_sparse()], dist.BroadcastOptions())),
        (ValueError, r"strides \[1, 4\]; expected a contiguous tensor",
         lambda: dist.send(torch.zeros(4, 4).t(), 1 - rank)),
        (ValueError, r"all_reduce: .* strides \[2\]; expected a tensor with neither gaps nor overlaps",
         lambda: dist.all_reduce(torch.zeros(8)[::2])),
        (ValueError, r"all_reduce: .* strides \[0, 1\]; expected a tensor with neither gaps nor overlaps",
         lambda: dist.all_reduce(torch.zeros(4).expand(3, 4))),
        (ValueError, r"send: tensor is a lazily conjugated view; .* pass .resolve_conj\(\)",
         lambda: backend.send([torch.zeros(4, dtype=torch.complex64).conj()], 1 - rank, 0)),
        (ValueError, r"all_gather: tensor_list .* strides \[0, 1\]; expected a tensor with neither gaps nor overlaps",
         lambda: dist.all_gather([torch.zeros(3).expand(2, 3) for _ in range(2)], torch.zeros(2, 3))),
        (TypeError, r"ReduceOp.PREMUL_SUM is not defined for dtype Int",
         lambda: dist.all_reduce(x.int(), dist._make_nccl_premul_sum(2.0))),
        (ValueError, r"operation on a sparse tensor is not SUM; expected SUM",
         lambda: dist.all_reduce(x.to_sparse(), dist.ReduceOp.MAX)),
        (ValueError, r"all_gather_into_tensor_coalesced: outputs has 1 tensors; expected 2 as inputs",
         lambda: pg.allgather_into_tensor_coalesced([torch.zeros(8)], [x, x])),
        (ValueError, r"send: dst is 7; expected a rank from 0 to 1", lambda: pg.send([x], 7, 0)),
        (ValueError, r"recv: src is -3; expected a rank from 0 to 1", lambda: pg.recv([x], -3, 0)),
        (ValueError, r"send: tag is -1; expected 0 or more", lambda: pg.send([x], 1 - rank, -1)),
        (ValueError, r"broadcast: src is 9; expected a rank", lambda: pg.broadcast(x, 9)),
        (TypeError, r"BAND is not defined for dtype Float; expected SUM, AVG, PRODUCT, MIN, MAX, PREMUL_SUM", lambda: dist.all_reduce(x, dist.ReduceOp.BAND)),
        (ValueError, r"output_tensor has 3 elements; expected 2 ranks x 4",
         lambda: pg._allgather_base(torch.zeros(3), x)),
        (ValueError, r"split sizes of input sum to 3; expected its 4 rows",
         lambda: dist.all_to_all_single(torch.zeros(4), x, [2, 2], [1, 2])),
        (ValueError, r"all_gather_coalesced: input_tensor_list is empty; expected one tensor or more",
         lambda: backend.allgather_coalesced([[], []], [])),
        (ValueError, r"has 5 rows; expected a multiple of the 2 ranks",
         lambda: dist.all_to_all_single(torch.zeros(5), torch.zeros(5))),
        (ValueError, r"all_to_all: input_tensor_list has 0 elements for this rank itself; expected 4 as output_tensor_list",
         lambda: dist.all_to_all([x, x.clone()], [x[: 0 if peer == rank else 4] for peer in range(2)])),
        (ValueError, r"all_to_all: input_tensor_list has 4 elements for this rank itself; expected 1 as output_tensor_list",
         lambda: dist.all_to_all([x[: 1 if peer == rank else 4].clone() for peer in range(2)], [x, x.clone()])),
        (ValueError, r"all_to_all_single: input has 3 elements for this rank itself; expected 2 as output",
         lambda: dist.all_to_all_single(torch.zeros(4), x, [2, 2], [3, 1] if rank == 0 else [1, 3])),
        (ValueError, r"set_timeout: timeout is -3000 ms; expected 0 or more", lambda: _set_timeout(before)),
        (ValueError, r"all_reduce: timeout is -3000 ms; expected 0 or more", lambda: pg.allreduce([x], hurried)),
        (ValueError, r"wait: timeout is -3000 ms; expected 0 or more",
         lambda: dist.all_reduce(x.clone(), async_op=True).wait(before)),
        (ValueError, r"timeout is -1 day, 23:59:55; expected 0 or more",
         lambda: dist.new_group(timeout=datetime.timedelta(seconds=-5))),
    ]  # fmt: skip
    pg = dist.group.WORLD
    backend = pg._get_backend(torch.device("cpu"))
    for error, pattern, call in cases:
        with pytest.raises(error, match=pattern):
            call()
        _still_works(rank, world_size)
    return True


def test_misuse_names_argument_value_and_expectation():
    assert all(run_ranks(_misuse, 2, "farandole"))


def _splits_wrap_around(rank, world_size):
    huge = (1 << 63) - 1
    for splits in ([huge, huge, 8], [6, huge, huge], [-1, 7, 0]):
        for outputs, inputs, argument in ((splits, [2] * 3, "output"), ([2] * 3, splits, "input")):
            with pytest.raises(ValueError, match=f"{argument} has split size (-1|{huge}); expected 0 to its 6 rows"):
                dist.all_to_all_single(torch.zeros(6), torch.zeros(6), outputs, inputs)
            _still_works(rank, world_size)
    return True


def test_split_sizes_whose_sum_wraps_around_are_refused():
    assert all(run_ranks(_splits_wrap_around, 3, "farandole"))


def _sizes_differ(rank, world_size):
    if rank == 0:
        dist.send(torch.zeros(4), 1, tag=3)
    else:
        with pytest.raises(
            ValueError,
            match=r"recv from rank 0 .*tag 3, 8 bytes.*sent 4 x Float \(16 bytes\) with tag 3, rank 1 .* 2 x Float \(8 bytes, shape \[2\]\)",
        ):
            dist.recv(torch.zeros(2), 0, tag=3)
    if rank == 1:
        dist.send(torch.zeros(2), 0)
    else:
        with pytest.raises(
            ValueError, match=r"rank 1 \(host .*, pid \d+\) sent 2 x Float \(8 bytes\).*receives 4 x Float \(16 bytes"
        ):
            dist.recv(torch.zeros(4), 1)
    _still_works(rank, world_size)
    return True


def test_a_message_of_another_size_is_an_error_on_the_receiver():
    assert all(run_ranks(_sizes_differ, 2, "farandole"))


def _set_timeout(timeout):
    dist.group.WORLD._get_backend(torch.device("cpu")).set_timeout(timeout)


def _timeouts(rank, world_size):
    if rank == 0:
        start = time.monotonic()
        with pytest.raises(RuntimeError, match=r"recv from rank 1 .*not done after its timeout of 200 ms"):
            dist.irecv(torch.zeros(1), 1).wait(datetime.timedelta(milliseconds=200))
        assert 0.15 < time.monotonic() - start < 10
        work = dist.irecv(torch.zeros(1), 1, tag=8)
        future = work.get_future()
        _set_timeout(datetime.timedelta(milliseconds=300))
        nobody = dist.irecv(torch.zeros(1), 1, tag=9).get_future()
        with pytest.raises(RuntimeError, match="not done when its timeout came"):
            nobody.wait()
        _set_timeout(datetime.timedelta(seconds=60))
        assert not future.done()
        dist.send(torch.zeros(1), 1)
        work.wait()
    else:
        dist.recv(torch.zeros(1), 0)
        dist.send(torch.zeros(1), 0, tag=8)
    _still_works(rank, world_size)
    return True


def test_a_timeout_is_an_error_and_the_group_goes_on():
    assert all(run_ranks(_timeouts, 2, "farandole"))


def _abort(rank, world_size):
    import threading

    if rank == 0:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        work = dist.irecv(torch.zeros(1), 1)
        threading.Timer(0.2, backend.abort).start()
        with pytest.raises(RuntimeError, match="aborted"):
            work.wait()
        with pytest.raises(RuntimeError, match="aborted"):
            dist.all_reduce(torch.zeros(1))
    await_all(rank, world_size)  # leaving would end the wait as well
    return True


def test_abort_from_another_thread_ends_a_wait():
    assert all(run_ranks(_abort, 2, "farandole"))


def _peer_dies(rank, world_size):
    _still_works(rank, world_size)
    dist.barrier()
    if rank == 1:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        # Its pidfd tells; the operation's own timeout bounds it.
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1"):
            dist.irecv(torch.zeros(1), 1).wait(datetime.timedelta(seconds=5))
        return time.monotonic() - start
    return None


def test_a_receive_from_a_killed_peer_is_an_error_that_names_it():
    from support.processes import RankFailed

    with pytest.raises(RankFailed) as failure:
        run_ranks(_peer_dies, 3, "farandole", timeout=30)
    assert "[rank 1] process ended with exit code -9" in str(failure.value)
    assert "[rank 0]" not in str(failure.value)


def _different_calls(rank, world_size, calls):
    call = calls[rank]
    with pytest.raises(ValueError, match="expected the same on all ranks") as error:
        if call == "broadcast":
            dist.broadcast(torch.zeros(4), 0)
        elif call == "barrier":
            dist.barrier()
        else:
            dtype, numel, op = call
            dist.all_reduce(torch.zeros(numel, dtype=dtype), op=op)
    await_all(rank, world_size)  # leaving would be another error
    return str(error.value)


@pytest.mark.parametrize(
    ("one", "other", "texts"),
    [
        (
            (torch.float32, 4, dist.ReduceOp.SUM),
            (torch.int32, 4, dist.ReduceOp.SUM),
            ["SUM of Float", "SUM of Int"],
        ),
        (
            (torch.float32, 4, dist.ReduceOp.SUM),
            (torch.float32, 4, dist.ReduceOp.MAX),
            ["SUM of Float", "MAX of Float"],
        ),
        (
            (torch.float32, 4, dist.ReduceOp.SUM),
            (torch.float32, 500_000, dist.ReduceOp.SUM),
            ["all_reduce of 16 bytes", "all_reduce of 2000000 bytes"],
        ),
        ("barrier", (torch.float32, 4, dist.ReduceOp.SUM), ["barrier", "all_reduce of 16 bytes"]),
    ],
)
def test_ranks_that_call_different_collectives_are_told_both_calls(one, other, texts):
    for message in run_ranks(_different_calls, 2, "farandole", calls=[one, other]):
        assert all(text in message for text in texts), message
