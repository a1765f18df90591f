"""Hooks that a group calls: for each work that ends, at a failure, around each call."""

import datetime
import pickle

import pytest
import torch
import torch.distributed as dist

from support.devices import ON_CPU, only_on_cpu
from support.processes import await_all, run_ranks
from support.torch_features import HAS_ABORT_HOOKS

# torch records what plugins do by their hooks where it has this.
HAS_RECORDER = hasattr(dist.distributed_c10d, "_FR_SELF_RECORDING_BACKENDS")


def _backend():
    return dist.group.WORLD._get_backend(torch.device("cpu"))


def _hooks(rank, world_size):
    seen = []
    group = dist.group.WORLD
    early = dist.all_reduce(torch.ones(1), async_op=True)
    early.wait()
    group._wait_for_pending_works()  # its end is told behind its waiters
    group._register_on_completion_hook(lambda info: seen.append((info.op_type, info.seq, info.active_duration)))
    works = [dist.all_reduce(torch.ones(10), async_op=True), dist.broadcast(torch.ones(3), 0, async_op=True)]
    for work in works:
        work.wait()
    group._wait_for_pending_works()
    kinds = sorted((str(kind).rpartition(".")[2], seq) for kind, seq, _ in seen)
    assert kinds == [("ALLREDUCE", 1), ("BROADCAST", 2)], kinds
    assert all(duration >= datetime.timedelta(0) for *_, duration in seen)
    with pytest.raises(RuntimeError, match="has an onCompletion hook already"):
        group._register_on_completion_hook(print)
    assert not ON_CPU or works[0]._get_duration() >= 0  # NCCL's have none
    assert _backend()._get_sequence_number_for_group() == 3
    return True


def test_completion_hooks_see_every_work_once_it_has_ended():
    assert all(run_ranks(_hooks, 2, "farandole"))


def _one_report_each(rank, world_size):
    """Of a batch with several peers, and of sums that take several steps."""
    seen, group = [], dist.group.WORLD
    group._register_on_completion_hook(lambda info: seen.append(str(info.op_type).rpartition(".")[2]))
    for _ in range(2):
        others = [r for r in range(world_size) if r != rank]
        ops = [dist.P2POp(dist.isend, torch.ones(3), r) for r in others]
        ops += [dist.P2POp(dist.irecv, torch.ones(3), r) for r in others]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        group._wait_for_pending_works()
        sparse = torch.eye(3).to_sparse()
        dist.all_reduce(sparse)
        assert torch.equal(sparse.to_dense(), torch.eye(3) * world_size)
        group._wait_for_pending_works()
    return seen


def test_a_completion_hook_hears_once_of_each_call():
    kinds = ["COALESCED", "_ALLREDUCE_SPARSE"] * 2
    assert run_ranks(_one_report_each, 3, "farandole") == [kinds] * 3


def _record_by_torch(rank, world_size):
    """The names and states of what was called, as torch has them once all has ended; a last receive has not."""
    to, source = (rank + 1) % world_size, (rank - 1) % world_size
    dist.barrier()
    dist.all_reduce(torch.ones(2))
    dist.all_reduce(torch.eye(3).to_sparse())
    ops = [dist.P2POp(dist.isend, torch.ones(5), to), dist.P2POp(dist.irecv, torch.ones(5), source)]
    ops += [dist.P2POp(dist.isend, torch.ones(2), rank), dist.P2POp(dist.irecv, torch.ones(2), rank)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    with dist._coalescing_manager(async_ops=True) as manager:
        for numel in (1, 3):
            dist.all_gather_into_tensor(torch.ones(world_size * numel), torch.ones(numel))
    manager.wait()
    works = [dist.isend(torch.ones(1), to), dist.irecv(torch.ones(1), source)]
    works[1].wait()
    works[0].wait()
    dist.group.WORLD._wait_for_pending_works()
    work = dist.irecv(torch.ones(1), source, tag=9)
    dump = pickle.loads(torch._C._distributed_c10d._dump_fr_trace(includeStackTraces=False, backend="farandole"))
    await_all(rank, world_size, "to the dump")
    dist.send(torch.ones(1), to, tag=9)
    work.wait()
    return [(entry["profiling_name"].partition(":")[2].partition(" ")[0], entry["state"]) for entry in dump["entries"]]


@pytest.mark.skipif(not HAS_RECORDER, reason="this torch has no recorder for plugins")
@only_on_cpu("a barrier is the CPU's")
def test_torchs_recorder_learns_of_the_end_of_each_call():
    env = {"FARANDOLE_FLIGHT_RECORDER": "torch"}
    names = ["barrier", "all_reduce", "all_reduce", "send", "recv", "send", "recv", "all_gather_into_tensor_coalesced"]
    expected = [(name, "completed") for name in [*names, "send", "recv"]] + [("recv", "scheduled")]
    for states in run_ranks(_record_by_torch, 3, "farandole", env=env):
        assert states == expected


def _abort_hooks(rank, world_size, by_abort):
    backend = _backend()
    for hooks in ("supports_abort_hooks", "supports_completion_hooks"):
        assert getattr(backend, hooks, True), hooks  # torch 2.14 and older do not ask
    aborts = []
    backend.register_abort_hook(1, lambda: aborts.append("one"))
    backend.register_abort_hook(2, lambda: aborts.append("two"))
    backend.unregister_abort_hook(2)
    dist.all_reduce(torch.ones(1))
    assert aborts == []
    dist.group.WORLD._wait_for_pending_works()
    await_all(rank, world_size)  # an abort is every rank's error
    if rank == 0:
        if by_abort:
            backend.abort()
        else:
            with pytest.raises(RuntimeError, match="not done after its timeout of 50 ms"):
                dist.irecv(torch.zeros(1), 1).wait(datetime.timedelta(milliseconds=50))
        dist.group.WORLD._wait_for_pending_works()
        assert aborts == ["one"]
    await_all(rank, world_size, "behind the failure")
    if not by_abort:
        dist.barrier()  # the group goes on
    return True


NEEDS_ABORT_HOOKS = pytest.mark.skipif(
    not HAS_ABORT_HOOKS, reason=f"torch {torch.__version__} has neither these hooks nor extensions"
)


@NEEDS_ABORT_HOOKS
@pytest.mark.parametrize(
    "by_abort", [pytest.param(False, marks=only_on_cpu("over NCCL no message is given up alone")), True]
)
def test_abort_hooks_are_called_at_a_failure_and_at_an_abort(by_abort):
    assert all(run_ranks(_abort_hooks, 2, "farandole", by_abort=by_abort))


def _extensions(rank, world_size):
    """Two add up for what begins, until the first of it has ended."""
    backend = _backend()
    dist.all_reduce(torch.ones(1))  # with as much time as it takes to begin
    backend.set_timeout(datetime.timedelta(seconds=10))
    backend._add_ephemeral_timeout(datetime.timedelta(seconds=3))
    backend._add_ephemeral_timeout(datetime.timedelta(seconds=4))
    work = dist.all_reduce(torch.ones(1), async_op=True)
    assert work.timeout == datetime.timedelta(seconds=17)
    work.wait()
    dist.group.WORLD._wait_for_pending_works()
    after = dist.all_reduce(torch.ones(1), async_op=True)
    assert after.timeout == datetime.timedelta(seconds=10)
    after.wait()
    return True


@NEEDS_ABORT_HOOKS
def test_extensions_of_the_timeout_add_up_and_end():
    assert all(run_ranks(_extensions, 2, "farandole"))


def _failures(rank, world_size):
    group, seen = dist.group.WORLD, []

    def hook(info):
        seen.append((str(info.op_type).rpartition(".")[2], info.seq, info.active_duration))
        raise ValueError("this hook always raises")

    group._register_on_completion_hook(hook)
    dist.all_reduce(torch.ones(1))
    fails = ON_CPU and rank == 0  # over NCCL a message is not given up alone
    if fails:
        with pytest.raises(RuntimeError, match="not done after its timeout of 50 ms"):
            dist.irecv(torch.zeros(1), 1, tag=9).wait(datetime.timedelta(milliseconds=50))
    await_all(rank, world_size)
    x = torch.ones(3)
    dist.all_reduce(x)  # what the hook raised is nobody's error
    group._wait_for_pending_works()
    assert x.tolist() == [float(world_size)] * 3
    kinds = [kind for kind, *_ in seen]
    assert kinds == (["ALLREDUCE", "RECV", "ALLREDUCE"] if fails else ["ALLREDUCE", "ALLREDUCE"]), seen
    if fails:  # it was started and given up
        assert datetime.timedelta(milliseconds=50) <= seen[1][2] < datetime.timedelta(seconds=20), seen
    assert seen[-1][1] == 1  # the second collective of the group, also where a message failed in between
    return True


def test_a_completion_hook_sees_failures_and_may_raise():
    assert all(run_ranks(_failures, 2, "farandole"))


def _around(rank, world_size):
    group, before, after = dist.group.WORLD, [], []
    group.register_pre_hook(1, before.append)
    group.register_pre_hook(2, lambda args: before.append(None))
    group.register_post_hook(1, after.append)
    group.unregister_pre_hook(2)
    x, flat = torch.full((4,), float(rank)), torch.zeros(4 * world_size)
    work = dist.all_reduce(x, async_op=True)
    work.wait()
    dist.broadcast(x, 1)
    dist.all_gather_into_tensor(flat, x)
    dist.barrier()
    names = [str(args.name).rpartition(".")[2] for args in before]
    assert names[:2] == ["ALLREDUCE", "BROADCAST"] and len(names) == 4 and names[3] == "BARRIER", names
    assert [args.name for args in after] == [args.name for args in before]
    assert [args.op_id for args in after] == [args.op_id for args in before]
    assert len({args.op_id for args in before}) == 4
    assert [args.async_op for args in before] == [True, False, False, False]
    assert before[0].input_tensors[0].data_ptr() == x.data_ptr() and before[1].root == 1
    assert before[2].output_tensors[0].data_ptr() == flat.data_ptr()
    flat.tolist()  # by now a GPU has come so far, too
    assert after[0].work.is_completed()
    group.unregister_pre_hook(1)
    group.unregister_post_hook(1)
    dist.all_reduce(x)
    assert len(before) == len(after) == 4

    def refuse(args):
        raise ValueError("not this one")

    # What a hook raises before a call is the caller's error, and nothing was called.
    group.register_pre_hook(3, refuse)
    with pytest.raises((ValueError, RuntimeError), match="not this one"):
        dist.all_reduce(x)
    group.unregister_pre_hook(3)
    x.fill_(1)
    dist.all_reduce(x)
    assert x.tolist() == [float(world_size)] * 4
    return True


@pytest.mark.skipif(not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="this torch has no such hooks")
def test_hooks_around_calls_tell_what_is_called():
    assert all(run_ranks(_around, 2, "farandole"))
