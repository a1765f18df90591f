"""What is wrong inside a batch is told when the batch ends, and nothing that comes after it is lost."""

import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.processes import run_ranks

pytestmark = only_on_cpu("the checks are the same ones on GPUs")


def _without_memory():
    tensor = torch.zeros(4)
    tensor.untyped_storage().resize_(0)
    return tensor


WRONG = {
    r"recv: tensor of shape \[4\] has strides \[2\]": lambda peer: dist.P2POp(dist.irecv, torch.zeros(8)[::2], peer),
    r"send: tensor of shape \[3\] has strides \[0\]": lambda peer: dist.P2POp(
        dist.isend, torch.zeros(1).expand(3), peer
    ),
    r"send: tensor of shape \[4\] has no memory": lambda peer: dist.P2POp(dist.isend, _without_memory(), peer),
    r"send: tag is -1; expected 0 or more": lambda peer: dist.P2POp(dist.isend, torch.zeros(4), peer, tag=-1),
    r"recv: tag is -7; expected 0 or more": lambda peer: dist.P2POp(dist.irecv, torch.zeros(4), peer, tag=-7),
}


def _expect_usable(rank, world_size):
    """Collectives first: those that c10d only notes would be done at once, and change nothing."""
    peer = 1 - rank
    data = torch.full((3,), rank + 1.0)
    dist.all_reduce(data)
    assert data.tolist() == [3.0] * 3
    gathered = torch.zeros(2)
    dist.all_gather_into_tensor(gathered, torch.full((1,), float(rank)))
    assert gathered.tolist() == [0.0, 1.0]
    into = torch.zeros(3)
    for work in [dist.isend(torch.full((3,), float(rank)), peer), dist.irecv(into, peer)]:
        work.wait()
    assert into.tolist() == [float(peer)] * 3


def _operations(rank, world_size):
    peer = 1 - rank
    for wanted, wrong in WRONG.items():
        for before, after in ((0, 0), (1, 0), (0, 1), (2, 1)):
            good = [dist.P2POp(dist.isend, torch.zeros(4), peer) for _ in range(before + after)]
            with pytest.raises(ValueError, match=wanted):
                dist.batch_isend_irecv([*good[:before], wrong(peer), *good[before:]])
            _expect_usable(rank, world_size)
    # The first of several is the one that is told.
    with pytest.raises(ValueError, match="tag is -3"):
        dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.zeros(4), peer, tag=tag) for tag in (1, -3, -4)])
    _expect_usable(rank, world_size)
    return True


def test_a_wrong_operation_of_a_batch_is_told_and_later_collectives_are_not_lost():
    assert all(run_ranks(_operations, 2, "farandole", timeout=60))


def _coalesced(rank, world_size):
    short = torch.zeros(3)

    def reduce():
        dist.all_reduce(torch.zeros(4))
        dist.all_reduce(torch.zeros(8)[::2])

    def gather():
        dist.all_gather_into_tensor(torch.zeros(8), torch.zeros(4))
        dist.all_gather_into_tensor(short, torch.zeros(4))

    def scatter():
        dist.reduce_scatter_tensor(torch.zeros(4), torch.zeros(8))
        dist.reduce_scatter_tensor(torch.zeros(4), short)

    for call, wanted in (
        (reduce, r"all_reduce_coalesced: tensors of shape \[4\] has strides \[2\]"),
        (gather, r"outputs has 3 elements; expected 2 ranks x 4"),
        (scatter, r"inputs has 3 elements; expected 2 ranks x 4"),
    ):
        with pytest.raises(ValueError, match=wanted), dist._coalescing_manager(device=torch.device("cpu")):
            call()
        peer, into = 1 - rank, torch.zeros(1)
        for work in [dist.isend(torch.full((1,), float(rank)), peer), dist.irecv(into, peer)]:
            work.wait()
        assert into.item() == peer
        _expect_usable(rank, world_size)
    return True


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_coalesced_collective_leaves_no_batch_open():
    assert all(run_ranks(_coalesced, 2, "farandole", timeout=60))


# Those that torch calls at once, where it collects others until the end of the batch.
AT_ONCE = {
    r"broadcast: tensor of shape \[4\] has strides \[2\]": lambda a: dist.broadcast(torch.zeros(8)[::2], 0, async_op=a),
    r"reduce: tensor of shape \[3\] has strides \[0\]": lambda a: dist.reduce(torch.zeros(1).expand(3), 0, async_op=a),
    r"all_gather: tensor_list has 3 tensors; expected 2": lambda a: dist.all_gather(
        [torch.zeros(4) for _ in range(3)], torch.zeros(4), async_op=a
    ),
    r"gather: tensor of shape \[4\] has no memory": lambda a: dist.gather(
        _without_memory(), [torch.zeros(4)] * 2 if dist.get_rank() == 0 else None, async_op=a
    ),
    r"scatter: tensor of shape \[4\] has strides \[2\]": lambda a: dist.scatter(
        torch.zeros(8)[::2], [torch.zeros(4)] * 2 if dist.get_rank() == 0 else None, async_op=a
    ),
    r"reduce_scatter: input_list has 1 tensors; expected 2": lambda a: dist.reduce_scatter(
        torch.zeros(4), [torch.zeros(4)], async_op=a
    ),
    r"all_to_all: input_tensor_list has 5 elements for this rank itself; expected 4": lambda a: dist.all_to_all(
        [torch.zeros(4) for _ in range(2)], [torch.zeros(5) for _ in range(2)], async_op=a
    ),
    r"split sizes of input sum to 5; expected its 6 rows": lambda a: dist.all_to_all_single(
        torch.zeros(6), torch.zeros(6), [3, 3], [2, 3], async_op=a
    ),
}


def _called_at_once(rank, world_size):
    for wanted, call in AT_ONCE.items():
        for is_async in (False, True):
            before = torch.full((2,), rank + 1.0)
            with pytest.raises(ValueError, match=wanted), dist._coalescing_manager(device=torch.device("cpu")):
                dist.broadcast(before, 1)
                call(is_async)
                dist.isend(torch.zeros(2), 1 - rank)  # is dropped with the batch
            assert before.tolist() == [2.0] * 2
            _expect_usable(rank, world_size)
    return True


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_collective_within_a_batch_is_told_at_its_end_and_later_ones_are_not_lost():
    assert all(run_ranks(_called_at_once, 2, "farandole", timeout=60))
