"""Every collective that reduces, with every operation and dtype, beside torch's NCCL and the sum on the CPU."""

import pytest
import torch
import torch.distributed as dist

from gpu.data import REDUCED, SIZES, assert_equal, nccl_takes, operations, part, parts, reduced
from support.gpus import needs_gpu, run_on_gpus

pytestmark = [needs_gpu, pytest.mark.timeout(400)]
LARGE = 5 * 2**20 + 3
SUM = dist.ReduceOp.SUM


def _cases(world_size):
    for seed, dtype in enumerate(REDUCED):
        for op in operations(dtype):
            for numel in SIZES:
                yield f"{dtype}, {op}, {numel} elements, {world_size} ranks", seed, dtype, op, numel
    yield f"large, {world_size} ranks", 99, torch.float32, SUM, LARGE


def _all_reduce(rank, world_size):
    nccl = dist.new_group(backend="nccl")
    for where, seed, dtype, op, numel in _cases(world_size):
        expected = reduced(op, parts(seed, world_size, numel, dtype))
        for group in (None, nccl):
            x = part(seed, rank, numel, dtype).cuda()
            dist.all_reduce(x, op, group=group)
            assert_equal(x, expected, f"{where}, {'NCCL' if group else 'farandole'}")


def test_all_reduce_gives_what_nccl_gives(world):
    run_on_gpus(_all_reduce, world, timeout=150)


def _reduce(rank, world_size):
    nccl = dist.new_group(backend="nccl")
    for index, (where, seed, dtype, op, numel) in enumerate(_cases(world_size)):
        expected, root = reduced(op, parts(seed, world_size, numel, dtype)), index % world_size
        for group in (None, nccl) if nccl_takes("reduce", dtype) else (None,):
            x = part(seed, rank, numel, dtype).cuda()
            dist.reduce(x, root, op, group=group)
            if rank == root:
                assert_equal(x, expected, f"{where}, root {root}, {'NCCL' if group else 'farandole'}")


def test_reduce_gives_its_root_what_nccl_gives(world):
    run_on_gpus(_reduce, world, timeout=150)


def _reduce_scatter(rank, world_size):
    nccl = dist.new_group(backend="nccl")
    for where, seed, dtype, op, numel in _cases(world_size):
        every = [part(seed, r, numel * world_size, dtype).view(world_size, numel) for r in range(world_size)]
        expected = reduced(op, [one[rank] for one in every])
        for group in (None, nccl) if nccl_takes("reduce_scatter", dtype) else (None,):
            name = f"{where}, {'NCCL' if group else 'farandole'}"
            mine = every[rank].cuda()
            output = torch.empty(numel, dtype=dtype, device="cuda")
            dist.reduce_scatter(output, list(mine.unbind()), op, group=group)
            assert_equal(output, expected, f"{name}, list")
            output = torch.empty(numel, dtype=dtype, device="cuda")
            dist.reduce_scatter_tensor(output, mine, op, group=group)
            assert_equal(output, expected, f"{name}, tensor")


def test_reduce_scatter_of_lists_and_tensors_gives_what_nccl_gives(world):
    run_on_gpus(_reduce_scatter, world, timeout=150)


def _uneven(rank, world_size):
    sizes = [7 * (r + 1) for r in range(world_size)]
    inputs = [[part(r, 10 + r, size, torch.float32) for size in sizes] for r in range(world_size)]
    output = torch.empty(sizes[rank], device="cuda")
    dist.reduce_scatter(output, [x.cuda() for x in inputs[rank]])
    assert_equal(output, reduced(SUM, [one[rank] for one in inputs]), "uneven")


def test_reduce_scatter_takes_lists_of_unequal_tensors(world):
    run_on_gpus(_uneven, world)


def _coalesced(rank, world_size):
    sizes = [3, 1000, 70_000]

    def mine(factor):
        return [part(numel, rank, numel * factor, torch.float32).cuda() for numel in sizes]

    def of_all(numel, factor):
        return parts(numel, world_size, numel * factor, torch.float32)

    tensors = mine(1)
    dist.all_reduce_coalesced(tensors)
    for numel, x in zip(sizes, tensors):
        assert_equal(x, reduced(SUM, of_all(numel, 1)), f"all_reduce_coalesced, {numel}")
    tensors = mine(1)
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for x in tensors:
            dist.all_reduce(x, dist.ReduceOp.MAX)
    manager.wait()
    for numel, x in zip(sizes, tensors):
        assert_equal(x, reduced(dist.ReduceOp.MAX, of_all(numel, 1)), f"coalesced all_reduce, {numel}")
    outputs = [torch.empty(numel, device="cuda") for numel in sizes]
    with dist.distributed_c10d._coalescing_manager():
        for output, x in zip(outputs, mine(world_size)):
            dist.reduce_scatter_tensor(output, x)
    for numel, output in zip(sizes, outputs):
        expected = reduced(SUM, [x.view(world_size, numel)[rank] for x in of_all(numel, world_size)])
        assert_equal(output, expected, f"coalesced reduce_scatter_tensor, {numel}")


@pytest.mark.filterwarnings("ignore:.*all_reduce_coalesced.*:FutureWarning")
def test_coalesced_reductions_reduce_each_tensor(world):
    run_on_gpus(_coalesced, world)


def _premul_sum(rank, world_size):
    nccl = dist.new_group(backend="nccl")
    for dtype in (torch.float16, torch.float32, torch.float64):
        expected = reduced(SUM, parts(3, world_size, 1000, dtype)) / 2
        factors = [0.5, torch.tensor([0.5], dtype=dtype, device="cuda")]
        for factor in factors if dtype != torch.float16 else factors[:1]:
            for group in (None, nccl):
                x = part(3, rank, 1000, dtype).cuda()
                dist.all_reduce(x, dist._make_nccl_premul_sum(factor), group=group)
                assert_equal(x, expected, f"{dtype}, factor {factor}, {'NCCL' if group else 'farandole'}")


def test_a_sum_with_a_factor_takes_a_number_and_a_tensor(world):
    run_on_gpus(_premul_sum, world)


def _sparse(rank, world_size):
    for seed in range(8):
        generator = torch.Generator().manual_seed(seed * 10 + rank)
        nnz, dense = [0, 1, 40, 3000][(seed + rank) % 4], [(), (3,)][seed % 2]
        indices = torch.randint(0, 50, (2, nnz), generator=generator)
        values = torch.randint(-9, 9, (nnz, *dense), generator=generator).float()
        on_cpu = torch.sparse_coo_tensor(indices, values, (50, 50, *dense), check_invariants=True)
        on_cuda = on_cpu.cuda()
        dist.all_reduce(on_cpu)
        work = dist.all_reduce(on_cuda, async_op=True)
        work.wait()
        assert torch.equal(on_cuda.to_dense().cpu(), on_cpu.to_dense()), seed
    return True


def test_sparse_tensors_are_summed_as_on_the_cpu(world):
    assert all(run_on_gpus(_sparse, world, timeout=150))
