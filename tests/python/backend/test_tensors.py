"""Which tensors the collectives take: dtypes, layouts, empty ones; very large ones are in test_large_tensors."""

import datetime

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional_collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import farandole
from support.devices import DEVICE, ON_CPU, backend_for, only_on_cpu, seeded
from support.hosts import PretendHost
from support.processes import run_ranks

BYTE_FLOATS = [torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz]


def _uncommon_dtypes(rank, world_size):
    for dtype in BYTE_FLOATS:
        for numel in (1, 1000, 70_001):
            parts = [(torch.randn(numel, generator=torch.Generator().manual_seed(r)) * 4).to(dtype) for r in range(3)]
            mine = parts[rank].clone()
            dist.all_reduce(mine)
            expected = (parts[0].float() + parts[1].float() + parts[2].float()).to(dtype)  # rounded once
            assert torch.equal(mine.view(torch.uint8), expected.view(torch.uint8)), (dtype, numel)
            mine = parts[rank].clone()
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            largest = torch.stack([p.float() for p in parts]).amax(0)
            assert torch.equal(mine.float(), largest), (dtype, numel)
            dist.broadcast(mine, 1)
    for dtype in (torch.uint16, torch.uint32, torch.uint64):
        mine = (torch.arange(5000) % 97 + rank).to(dtype)
        dist.all_reduce(mine)
        assert torch.equal(mine.long(), (torch.arange(5000) % 97) * 3 + 3), dtype
    parts = [torch.randn(3001, 2, generator=torch.Generator().manual_seed(r)).half() for r in range(3)]
    half = torch.view_as_complex(parts[rank].clone())
    dist.group.WORLD.allreduce([half]).wait()  # dist.all_reduce would view it as real
    expected = (parts[0].float() + parts[1].float() + parts[2].float()).half()
    assert torch.equal(torch.view_as_real(half), expected)
    return True


@only_on_cpu("NCCL has some of these, and rounds them at each step")
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_eight_bit_floats_unsigned_integers_and_complex_half_are_reduced():
    assert all(run_ranks(_uncommon_dtypes, 3, "farandole"))


def _byte_floats(rank, world_size):
    """On one host they are accumulated in float, in the order of the ranks, and rounded once, as torch rounds."""
    group = dist.group.WORLD
    for dtype in BYTE_FLOATS:
        for numel in (1, 1000, 70_001):
            parts = []
            for r in range(world_size):
                part = torch.randn(numel * world_size, generator=torch.Generator().manual_seed(r)).clamp(-3, 3)
                part[:: 11 + r] = torch.nan
                parts.append(part.to(dtype))
            wide = [part.float() for part in parts]
            # amin and amax pass NaN on.
            results = {
                dist.ReduceOp.SUM: wide[0] + wide[1] + wide[2],
                dist.ReduceOp.AVG: (wide[0] + wide[1] + wide[2]) / 3,
                dist.ReduceOp.PRODUCT: wide[0] * wide[1] * wide[2],
                dist.ReduceOp.MIN: torch.stack(wide).amin(0),
                dist.ReduceOp.MAX: torch.stack(wide).amax(0),
            }
            for op, result in results.items():
                expected, mine = result.to(dtype).float(), parts[rank].clone()
                dist.all_reduce(mine, op)
                _same_values(mine, expected, (dtype, op, numel, "all_reduce"))
                assert mine[0].float().isnan()
                shard = expected.chunk(world_size)[rank]
                into = torch.empty(numel, dtype=dtype)
                dist.reduce_scatter_tensor(into, parts[rank], op)
                _same_values(into, shard, (dtype, op, numel, "reduce_scatter_tensor"))
                options = dist.AllreduceCoalescedOptions()
                options.reduceOp = op
                both = [parts[rank].clone(), parts[rank][:numel].clone()]
                group.allreduce_coalesced(both, options).wait()
                _same_values(both[0], expected, (dtype, op, numel, "all_reduce_coalesced"))
                _same_values(both[1], expected[:numel], (dtype, op, numel, "all_reduce_coalesced"))
    return True


def _same_values(ours, expected, what):
    wide = ours.float()
    assert torch.equal(wide.isnan(), expected.isnan()), what
    assert torch.equal(wide.nan_to_num(0), expected.nan_to_num(0)), what


@only_on_cpu("NCCL has some of these, and rounds them at each step")
def test_eight_bit_floats_are_reduced_as_torch_does_it_through_float_and_nan_stays():
    assert all(run_ranks(_byte_floats, 3, "farandole"))


def _premul(rank, world_size):
    def wide(x):  # in which float8 can be compared
        return x if x.is_complex() else x.double()

    def same(x, y):
        return x.dtype == y.dtype and torch.equal(wide(x), wide(y))

    for dtype in (torch.float32, torch.float64, torch.bfloat16, *((torch.complex64, *BYTE_FLOATS) if ON_CPU else ())):

        def full(value, numel=1000, dtype=dtype):
            return torch.full((numel,), value).to(dtype)

        given = [full(0.5 * (r + 1) ** 2) for r in range(world_size)]
        expected = sum(map(wide, given)).to(dtype)
        for factor in (0.5 * (rank + 1), torch.tensor([0.5 * (rank + 1)])):
            op = dist._make_nccl_premul_sum(factor)  # each rank's own factor, for what it gives
            x = full(rank + 1.0)
            dist.all_reduce(x, op)
            assert same(x, expected), dtype
            x = full(rank + 1.0)
            dist.reduce(x, 1, op)
            assert same(x, expected if rank == 1 else full(rank + 1.0)), dtype
            source = full(rank + 1.0, 1000 * world_size)
            kept, into = source.clone(), full(0.0)
            dist.reduce_scatter_tensor(into, source, op)
            assert same(into, expected) and same(source, kept), dtype
            dist.reduce_scatter(into.zero_(), list(source.chunk(world_size)), op)
            assert same(into, expected) and same(source, kept), dtype
    return True


def test_premul_sum_multiplies_what_each_rank_gives_by_its_factor():
    assert all(run_ranks(_premul, 3, "farandole"))


def _channels_last(rank, world_size):
    gloo = dist.new_group(backend=backend_for("gloo"))

    def image(seed):
        x = torch.randn(2, 3, 5, 7, generator=seeded(seed))
        return x.contiguous(memory_format=torch.channels_last)

    for call in (dist.all_reduce, lambda x, group=None: dist.broadcast(x, 1, group=group)):
        ours, theirs = image(rank), image(rank)
        call(ours)
        call(theirs, group=gloo)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        assert ours.is_contiguous(memory_format=torch.channels_last)
    ours, theirs = image(rank), image(rank)
    dist.reduce(ours, 0)
    dist.reduce(theirs, 0, group=gloo)
    if rank == 0:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    gathered = [torch.empty_like(image(0)) for _ in range(world_size)]
    dist.all_gather(gathered, image(rank))
    assert all(torch.equal(gathered[r], image(r)) for r in range(world_size))
    scattered = torch.empty_like(image(0))
    dist.scatter(scattered, [image(r) for r in range(world_size)] if rank == 0 else None, 0)
    assert torch.equal(scattered, image(rank))
    transposed = torch.arange(12.0).view(3, 4).t() * (rank + 1)
    dist.all_reduce(transposed)
    assert torch.equal(transposed, torch.arange(12.0).view(3, 4).t() * 3)
    return True


def test_channels_last_and_transposed_tensors_are_reduced_as_gloo_does():
    assert all(run_ranks(_channels_last, 2, "farandole"))


def _empty(rank, world_size):
    for shape in ((0,), (0, 5), (4, 0, 2)):
        x = torch.zeros(shape)
        dist.all_reduce(x)
        dist.broadcast(x, 0)
        dist.reduce(x, 1, dist.ReduceOp.MAX)
        dist.all_gather([torch.zeros(shape) for _ in range(world_size)], x)
        dist.all_to_all([torch.zeros(shape) for _ in range(world_size)], [x] * world_size)
        flat = torch.zeros(0)
        dist.all_gather_into_tensor(flat, x.flatten())
        dist.reduce_scatter_tensor(flat, x.flatten())
        dist.all_to_all_single(flat, flat.clone())
        if rank < 2:
            work = dist.isend(x, 1 - rank)
            dist.recv(x, 1 - rank)
            work.wait()
    empty = torch.zeros(4, 4).to_sparse()
    dist.all_reduce(empty)
    assert empty._nnz() == 0
    return True


def test_tensors_without_elements_pass_through_every_collective():
    assert all(run_ranks(_empty, 3, "farandole"))


def _coalesced(rank, world_size):
    group, sizes = dist.group.WORLD, (3, 0, 500, 70_000)
    outputs = [torch.zeros(n * world_size) for n in sizes]
    group.allgather_into_tensor_coalesced(outputs, [torch.full((n,), float(rank)) for n in sizes]).wait()
    for n, output in zip(sizes, outputs):
        assert torch.equal(output, torch.arange(float(world_size)).repeat_interleave(n))
    outputs = [torch.zeros(n) for n in sizes]
    group.reduce_scatter_tensor_coalesced(outputs, [torch.full((n * world_size,), float(rank)) for n in sizes]).wait()
    assert all(torch.equal(o, torch.full((n,), 3.0)) for n, o in zip(sizes, outputs))
    lists = [[torch.zeros(n) for n in sizes] for _ in range(world_size)]
    group.allgather_coalesced(lists, [torch.full((n,), float(rank)) for n in sizes]).wait()
    assert all(torch.equal(lists[r][j], torch.full((n,), float(r))) for r in range(3) for j, n in enumerate(sizes))
    x, y = torch.ones(5), torch.ones(7)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(y)
    manager.wait()
    assert x.tolist() == [3.0] * 5 and y.tolist() == [3.0] * 7
    whole = torch.zeros(2 * world_size) if rank == 1 else torch.zeros(0)
    if hasattr(dist, "gather_into_tensor"):
        dist.gather_into_tensor(torch.full((2,), float(rank)), whole if rank == 1 else None, dst=1)
        assert rank != 1 or whole.tolist() == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    return True


def test_every_coalesced_form_and_gather_into_one_tensor():
    assert all(run_ranks(_coalesced, 3, "farandole"))


def _freed_early(rank, world_size):
    peer = 1 - rank
    for index in range(300):
        numel = 100_000 if index % 10 == 0 else 20
        sent = torch.full((numel,), float(index))
        dist.isend(sent, peer, tag=1)  # neither the work nor the tensor is kept
        del sent
        into = torch.empty(numel)
        dist.recv(into, peer, tag=1)
        assert into[0] == index and into[-1] == index
        work = dist.all_reduce(torch.full((numel,), 1.0), async_op=True)
        (result,) = work.result()
        work.wait()
        assert torch.all(result == 2)
        dist.all_reduce(torch.zeros(numel), async_op=True)
        del work, result
    dist.barrier()
    return True


def test_tensors_that_are_freed_while_their_operation_runs_live_until_it_ends():
    assert all(run_ranks(_freed_early, 2, "farandole"))


def _sparse(rank, world_size):
    gloo = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=60))
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed * 10 + rank)
        nnz, dense = [0, 1, 40, 3000][(seed + rank) % 4], [(), (3,)][seed % 2]
        dtype = [torch.float64, torch.float32, torch.int64][seed % 3]
        indices = torch.randint(0, 50, (2, nnz), generator=generator)
        values = torch.randint(-9, 9, (nnz, *dense), generator=generator).to(dtype)
        ours = torch.sparse_coo_tensor(indices, values, (50, 50, *dense), check_invariants=True)
        theirs = ours.clone()
        dist.all_reduce(ours)
        dist.all_reduce(theirs, group=gloo)
        assert torch.equal(ours.to_dense(), theirs.to_dense()), seed
        work = dist.all_reduce(theirs, async_op=True)
        (value,) = work.get_future().wait()
        work.wait()
        assert work.is_completed() and work.is_success() and value.is_sparse
    halves = torch.sparse_coo_tensor([[0, 1]], torch.tensor([2048.0, 1.0]).half(), (4,), check_invariants=True)
    dist.all_reduce(halves)  # 2048 + 2048 + 2048
    assert halves.to_dense().tolist() == [2048.0 * world_size, float(world_size), 0.0, 0.0]
    odd = torch.zeros(4 + (rank == 1), 2).to_sparse()
    with pytest.raises(ValueError, match=r"rank \d has a sparse tensor Float \[\d, 2\].*; expected Float \[\d, 2\]"):
        dist.all_reduce(odd)
    dist.barrier()
    return True


@only_on_cpu("tests/python/gpu/test_reductions has it on GPUs")
def test_sparse_tensors_are_summed_as_gloo_does():
    assert all(run_ranks(_sparse, 3, "farandole"))


def _several_sparse(rank, world_size):
    """Each has a second half that begins when the first one ends: in which order is another matter on each rank."""
    for _ in range(50):
        sparse = [
            torch.sparse_coo_tensor([[k]], [float((k + 1) * (rank + 1))], (8,), check_invariants=True) for k in range(3)
        ]
        dense = torch.ones(100)
        works = [dist.all_reduce(x, async_op=True) for x in (*sparse, dense)]
        for work in works[::-1] if rank == 0 else works:
            work.wait()
        total = sum(range(1, world_size + 1))
        for k, x in enumerate(sparse):
            assert x.to_dense().tolist() == [(k + 1.0) * total if i == k else 0.0 for i in range(8)]
        assert dense.tolist() == [float(world_size)] * 100
    return True


@pytest.mark.parametrize(
    "hosts", [(0, 0), pytest.param((0, 0, 1, 1), marks=only_on_cpu("to NCCL hosts are nothing"))], ids=str
)
def test_several_sparse_sums_and_a_dense_one_are_under_way_at_once(hosts):
    assert all(run_ranks(_several_sparse, len(hosts), "farandole", enter=PretendHost(hosts)))


def _take_what_has_no_memory(rank, world_size):
    """c10d's calls await an AsyncCollectiveTensor; farandole.batch_p2p, which is none of them, does so itself."""
    pending = functional_collectives.all_reduce(torch.full((1000,), 1.0 + rank), "sum", dist.group.WORLD)
    assert type(pending) is functional_collectives.AsyncCollectiveTensor
    received = torch.zeros(1000)
    ops = [dist.P2POp(dist.isend, pending, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
    for work in farandole.batch_p2p(ops).values():
        work.wait()
    assert torch.equal(received, torch.full((1000,), 3.0))

    sharded = DTensor.from_local(torch.ones(4), init_device_mesh(DEVICE, (world_size,)), [Shard(0)])
    freed = torch.ones(4)
    freed.untyped_storage().resize_(0)
    backend = dist.group.WORLD._get_backend(torch.device("cpu"))
    for tensor in (sharded, freed):
        with pytest.raises(
            ValueError, match=r"of shape \[\d\] has no memory .*expected a tensor with memory of its own"
        ):
            farandole.batch_p2p([dist.P2POp(dist.isend, tensor, 1 - rank)])
        with pytest.raises(ValueError, match=r"all_reduce: .*has no memory"):
            backend.allreduce([tensor])
    after = torch.ones(1)
    dist.all_reduce(after)
    assert after.item() == world_size


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_stand_for_others_are_awaited_or_refused():
    run_ranks(_take_what_has_no_memory, 2, "farandole")
