"""What a collective only reads, and lists that it gathers into, may have gaps in memory: a column, say, or a chunk of
the last dimension."""

import random
from itertools import chain

import pytest
import torch
import torch.distributed as dist

from support.devices import ON_CPU, only_on_cpu
from support.hosts import PretendHost
from support.processes import run_ranks

ROWS = 4


def _matrix(rank, columns):
    return torch.arange(float(ROWS * columns)).view(ROWS, columns) + 100 * rank


def _column(rank):
    return _matrix(rank, 2)[:, 1]


def _chunks(rank, world_size):
    return list(_matrix(rank, 3 * world_size).chunk(world_size, dim=1))


def _all_gather(rank, world_size):
    outputs = [torch.zeros(ROWS) for _ in range(world_size)]
    dist.all_gather(outputs, _column(rank))
    return outputs, [_column(peer) for peer in range(world_size)]


def _all_gather_into_tensor(rank, world_size):
    output = torch.zeros(ROWS * world_size)
    dist.all_gather_into_tensor(output, _column(rank))
    return [output], [torch.cat([_column(peer) for peer in range(world_size)])]


def _all_gather_several(rank, world_size):
    outputs = [[torch.zeros(ROWS), torch.zeros(ROWS, 3)] for _ in range(world_size)]
    dist.distributed_c10d.all_gather_coalesced(outputs, [_column(rank), _chunks(rank, world_size)[1]])
    expected = [[_column(peer), _chunks(peer, world_size)[1]] for peer in range(world_size)]
    return [*chain(*outputs)], [*chain(*expected)]


def _gather(rank, world_size):
    outputs = [torch.zeros(ROWS) for _ in range(world_size)] if rank == 1 else None
    dist.gather(_column(rank), outputs, dst=1)
    return outputs or [], [_column(peer) for peer in range(world_size)] if rank == 1 else []


def _scatter(rank, world_size):
    output = torch.zeros(ROWS, 3)
    dist.scatter(output, _chunks(1, world_size) if rank == 1 else None, src=1)
    return [output], [_chunks(1, world_size)[rank]]


def _reduce_scatter(rank, world_size):
    output = torch.zeros(ROWS, 3)
    dist.reduce_scatter(output, _chunks(rank, world_size))
    return [output], [sum(_chunks(peer, world_size)[rank] for peer in range(world_size))]


def _reduce_scatter_tensor(rank, world_size):
    output = torch.zeros(ROWS // world_size)
    dist.reduce_scatter_tensor(output, _column(rank))
    return [output], [sum(_column(peer) for peer in range(world_size)).chunk(world_size)[rank]]


def _all_to_all_of_orders(rank, world_size):
    """Each rank's tensors have their dimensions in memory in an order of its own."""

    def strided(tensor, of):
        return tensor if of % 2 == 0 else tensor.t().contiguous().t()

    outputs = [strided(torch.zeros(ROWS, 3), rank // 2 + peer) for peer in range(world_size)]
    dist.all_to_all(outputs, [strided(chunk, rank) for chunk in _chunks(rank, world_size)])
    return outputs, [_chunks(peer, world_size)[rank] for peer in range(world_size)]


def _all_to_all_into_gaps(rank, world_size):
    whole = torch.zeros(ROWS, 3 * world_size)
    dist.all_to_all(list(whole.chunk(world_size, dim=1)), _chunks(rank, world_size))
    return [whole], [torch.cat([_chunks(peer, world_size)[rank] for peer in range(world_size)], dim=1)]


def _all_to_all(rank, world_size):
    outputs = [torch.zeros(ROWS, 3) for _ in range(world_size)]
    dist.all_to_all(outputs, _chunks(rank, world_size))
    return outputs, [_chunks(peer, world_size)[rank] for peer in range(world_size)]


def _broadcast_row(rank, world_size):
    """Overlaps: the same row for each."""
    output = torch.zeros(world_size * 6)
    dist.all_gather_into_tensor(output, torch.full((3,), float(rank)).expand(2, 3))
    return [output], [torch.arange(float(world_size)).repeat_interleave(6)]


CALLS = [
    _all_gather,
    _all_gather_into_tensor,
    _all_gather_several,
    _gather,
    _scatter,
    _reduce_scatter,
    _reduce_scatter_tensor,
    _all_to_all,
    *([_all_to_all_into_gaps] if ON_CPU else []),
    _all_to_all_of_orders,
    _broadcast_row,
]


def _run(rank, world_size):
    for call in CALLS:
        outputs, expected = call(rank, world_size)
        assert len(outputs) == len(expected), call
        assert all(torch.equal(*pair) for pair in zip(outputs, expected)), call
    return True


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("world_size", [2, 4])
def test_inputs_with_gaps_and_overlaps_arrive_as_their_values(world_size):
    assert all(run_ranks(_run, world_size, "farandole", timeout=60))


def _gather_into_chunks(rank, world_size, seed):
    """Of the last dimension, of another order, of every second row; asynchronously, too."""
    rng = random.Random(seed)
    for case in range(60):
        rows, columns = rng.choice([1, 3, 64]), rng.choice([1, 5, 300])
        given = [torch.arange(float(rows * columns)).view(rows, columns) + 100 * peer for peer in range(world_size)]
        if rng.random() < 0.5:
            given = [tensor.t().contiguous().t() for tensor in given]
        whole = torch.full((2 * rows, columns * world_size), -1.0)
        chunks = list(whole[::2].chunk(world_size, dim=1))
        if rng.random() < 0.3:
            chunks[rng.randrange(world_size)] = torch.full((rows, columns), -1.0)
        root = rng.randrange(world_size)
        name, is_async = rng.choice(["all_gather", "gather"]), rng.random() < 0.5
        if name == "all_gather":
            work = dist.all_gather(chunks, given[rank], async_op=is_async)
        else:
            work = dist.gather(given[rank], chunks if rank == root else None, root, async_op=is_async)
        if is_async:
            work.get_future().wait()
        if name == "all_gather" or rank == root:
            same = all(map(torch.equal, chunks, given))
            assert same and (whole[1::2] == -1).all(), f"seed {seed} case {case}: {name} of {rows} x {columns}"
    return True


@only_on_cpu("a list on a GPU has no gaps")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("hosts", [(0, 0), (0, 1), (0, 0, 1, 1)], ids=str)
def test_lists_with_gaps_are_gathered_into(hosts):
    seed = random.randrange(1 << 30)
    assert all(run_ranks(_gather_into_chunks, len(hosts), "farandole", enter=PretendHost(hosts), timeout=60, seed=seed))


def _listed_twice(rank, world_size):
    results = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        twice, once = torch.full((5,), float(rank + 1)), torch.full((3,), float(rank))
        dist.distributed_c10d.all_reduce_coalesced([twice, once, twice], group=group)
        results.append((twice.tolist(), once.tolist()))
    return results


@only_on_cpu("NCCL beside it would reduce it twice")
@pytest.mark.filterwarnings("ignore")
def test_a_tensor_that_is_listed_twice_is_reduced_once_as_by_gloo():
    for ours, theirs in run_ranks(_listed_twice, 3, "farandole", timeout=60):
        assert ours == theirs == ([6.0] * 5, [3.0] * 3)


def _lazy_clones(rank, world_size):
    results = []
    for group in (dist.group.WORLD, dist.new_group(backend="gloo")):
        tensor = torch.full((5,), float(rank + 1))
        # On some ranks only: the others have as many calls.
        clone = tensor.clone() if rank == 2 else torch._lazy_clone(tensor)
        dist.distributed_c10d.all_reduce_coalesced([tensor, clone], group=group)
        results.append((tensor.tolist(), clone.tolist()))
    return results


@only_on_cpu("what it is compared with is gloo's")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("hosts", [(0, 0, 0), (0, 1, 1)], ids=str)
def test_a_lazy_clone_is_reduced_beside_what_it_was_cloned_from(hosts):
    for ours, theirs in run_ranks(_lazy_clones, 3, "farandole", enter=PretendHost(hosts), timeout=60):
        assert ours == theirs == ([6.0] * 5, [6.0] * 5)
