"""Every collective that only moves data, with every dtype, beside torch's NCCL."""

import pytest
import torch
import torch.distributed as dist

from gpu.data import MOVED, SIZES, nccl_takes, part, same_bits
from support.gpus import needs_gpu, run_on_gpus

pytestmark = [needs_gpu, pytest.mark.timeout(400)]


def _empty(numel, dtype, count=None):
    outputs = [
        torch.zeros(numel, dtype=torch.uint8 if dtype.itemsize == 1 else dtype, device="cuda")
        for _ in range(count or 1)
    ]
    outputs = [output.view(dtype) for output in outputs]
    return outputs[0] if count is None else outputs


def _cat(tensors):
    """torch cannot concatenate float8 on the CPU."""
    dtype = tensors[0].dtype
    return torch.cat([x.view(torch.uint8) for x in tensors]).view(dtype)


def _run(kind, rank, n, root, group, inputs, dtype, numel):
    """What a collective gives this rank, and what it should have."""
    mine = inputs[rank].cuda()
    if kind == "broadcast":
        dist.broadcast(mine, root, group=group)
        return [mine], [inputs[root]]
    if kind == "all_gather":
        outputs = _empty(numel, dtype, n)
        dist.all_gather(outputs, mine, group=group)
        return outputs, inputs
    if kind == "all_gather_into_tensor":
        flat = _empty(numel * n, dtype)
        dist.all_gather_into_tensor(flat, mine, group=group)
        return [flat], [_cat(inputs)]
    if kind == "all_gather_into_tensor, a row for each rank":
        rows = _empty(numel * n, dtype).view(n, numel)
        dist.all_gather_into_tensor(rows, mine, group=group)
        return [rows.view(-1)], [_cat(inputs)]
    if kind == "gather":
        outputs = _empty(numel, dtype, n)
        dist.gather(mine, outputs if rank == root else None, dst=root, group=group)
        return (outputs, inputs) if rank == root else ([], [])
    if kind == "scatter":
        output = _empty(numel, dtype)
        dist.scatter(output, [x.cuda() for x in inputs] if rank == root else None, src=root, group=group)
        return [output], [inputs[rank]]
    every = [[part(7 * sender + receiver, 50, numel, dtype) for receiver in range(n)] for sender in range(n)]
    expected = [row[rank] for row in every]
    if kind == "all_to_all":
        outputs = _empty(numel, dtype, n)
        dist.all_to_all(outputs, [x.cuda() for x in every[rank]], group=group)
        return outputs, expected
    assert kind == "all_to_all_single"
    flat = _empty(numel * n, dtype)
    dist.all_to_all_single(flat, _cat(every[rank]).cuda(), group=group)
    return [flat], [_cat(expected)]


KINDS = [
    "broadcast", "all_gather", "all_gather_into_tensor", "all_gather_into_tensor, a row for each rank", "gather",
    "scatter", "all_to_all", "all_to_all_single",
]  # fmt: skip


def _move(rank, world_size, kinds):
    nccl = dist.new_group(backend="nccl")
    for kind in kinds:
        for seed, dtype in enumerate(MOVED):
            for numel in SIZES:
                root = (seed + numel) % world_size
                inputs = [part(seed, r, numel, dtype) for r in range(world_size)]
                for group in (None, nccl) if nccl_takes(kind, dtype) else (None,):
                    outputs, expected = _run(kind, rank, world_size, root, group, inputs, dtype, numel)
                    where = f"{kind}, {dtype}, {numel} elements, root {root}, {'NCCL' if group else 'farandole'}"
                    assert len(outputs) == len(expected), where
                    assert all(map(same_bits, outputs, expected)), where


@pytest.mark.parametrize("half", [0, 1], ids=["from one rank or to all", "between all ranks"])
def test_every_byte_of_every_dtype_arrives(world, half):
    run_on_gpus(_move, world, timeout=150, kinds=KINDS[4 * half : 4 * half + 4])


def _uneven(rank, world_size):
    sizes = [[(5 * sender + 3 * receiver) % 11 for receiver in range(world_size)] for sender in range(world_size)]
    every = [[part(9 * s + r, 60, sizes[s][r], torch.float32) for r in range(world_size)] for s in range(world_size)]
    takes, gives = [sizes[s][rank] for s in range(world_size)], sizes[rank]
    expected = torch.cat([every[s][rank] for s in range(world_size)])
    flat = torch.zeros(sum(takes), device="cuda")
    dist.all_to_all_single(flat, torch.cat(every[rank]).cuda(), takes, gives)
    assert same_bits(flat, expected), "all_to_all_single with splits"
    outputs = [torch.zeros(size, device="cuda") for size in takes]
    dist.all_to_all(outputs, [x.cuda() for x in every[rank]])
    assert same_bits(torch.cat(outputs), expected), "all_to_all of unequal tensors"

    lengths = [4 * r + 1 for r in range(world_size)]
    outputs = [torch.zeros(length, device="cuda") for length in lengths]
    dist.all_gather(outputs, torch.full((lengths[rank],), float(rank), device="cuda"))
    assert all(torch.equal(x, torch.full_like(x, float(r))) for r, x in enumerate(outputs)), "all_gather"


def test_what_ranks_give_each_other_may_differ_in_size(world):
    run_on_gpus(_uneven, world)


def _splits_of_rows(rank, world_size):
    rows = torch.full((world_size * 3, 5), float(rank), device="cuda")
    output = torch.zeros_like(rows)
    dist.all_to_all_single(output, rows, [3] * world_size, [3] * world_size)
    for sender, block in enumerate(output.chunk(world_size)):
        assert torch.equal(block, torch.full_like(block, float(sender)))


def test_splits_count_rows(world):
    run_on_gpus(_splits_of_rows, world)


def _empty_tensors(rank, world_size):
    nothing = torch.empty(0, device="cuda")
    dist.all_reduce(nothing)
    dist.broadcast(nothing, 0)
    dist.all_gather_into_tensor(torch.empty(0, device="cuda"), nothing)
    total = torch.ones(3, device="cuda")
    dist.all_reduce(total)
    return total.tolist()


def test_nothing_can_be_moved_too(world):
    assert run_on_gpus(_empty_tensors, world) == [[float(world.size)] * 3] * world.size


def _coalesced(rank, world_size):
    sizes = [2, 900, 65_537]
    outputs = [torch.zeros(size * world_size, device="cuda") for size in sizes]
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for size, output in zip(sizes, outputs):
            dist.all_gather_into_tensor(output, torch.full((size,), float(rank + size), device="cuda"))
    manager.wait()
    for size, output in zip(sizes, outputs):
        expected = torch.cat([torch.full((size,), float(r + size)) for r in range(world_size)])
        assert same_bits(output, expected), size


def test_coalesced_all_gathers_fill_each_output(world):
    run_on_gpus(_coalesced, world)


def _objects(rank, world_size):
    results = []
    for group in (None, dist.new_group(backend="cuda:farandole")):
        gathered = [None] * world_size
        dist.all_gather_object(gathered, {"rank": rank, "text": "x" * (1000 * rank)}, group=group)
        box = [f"from {rank}"]
        dist.broadcast_object_list(box, src=world_size - 1, group=group)
        taken = [None]
        dist.scatter_object_list(taken, list(range(world_size)) if rank == 0 else None, src=0, group=group)
        results.append(([one["rank"] for one in gathered], len(gathered[-1]["text"]), box, taken))
    return results


def test_objects_travel_through_the_cpu_and_through_cuda(world):
    last = world.size - 1
    for rank, results in enumerate(run_on_gpus(_objects, world)):
        assert results == [(list(range(world.size)), 1000 * last, [f"from {last}"], [rank])] * 2


def _barrier(rank, world_size):
    for _ in range(3):
        dist.barrier()
        dist.barrier(device_ids=[torch.cuda.current_device()])
    work = dist.barrier(async_op=True, device_ids=[torch.cuda.current_device()])
    work.wait()


@pytest.mark.filterwarnings("ignore:.*using the device under current context.*")
def test_barriers_pass_on_either_device(world):
    run_on_gpus(_barrier, world)
