"""Every collective against gloo or torch's own arithmetic, on random input."""

import math
import random
import time

import numpy
import pytest
import torch
import torch.distributed as dist

from support.devices import DEVICE, ON_CPU, only_on_cpu, seeded
from support.hosts import PretendHost
from support.processes import run_ranks

DTYPES = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
]  # fmt: skip
REDUCED = [dtype for dtype in DTYPES if ON_CPU or dtype != torch.int16]
SIZES = [0, 1, 3, 8, 127, 2048, 4099, 65_536, 300_001]
ROUNDS = 150 if ON_CPU else 50


def _data(seed, rank, numel, dtype):
    generator = seeded(seed * 1009 + rank)
    if not ON_CPU and (dtype.is_floating_point or dtype.is_complex):
        # NCCL has an order of its own: numbers whose sums and products are exact in any.
        return torch.randint(-3, 4, (numel,), generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, (numel,), generator=generator).bool()
    if dtype.is_complex:
        real = torch.float32 if dtype == torch.complex64 else torch.float64
        return torch.complex(*(torch.randn(numel, generator=generator, dtype=real) for _ in range(2)))
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 5, (numel,), generator=generator).to(dtype)


def _expected(op, parts):
    """In rank order; half kinds in float, rounded once."""
    dtype = parts[0].dtype
    acc = parts[0].float() if dtype in (torch.float16, torch.bfloat16) else parts[0].clone()
    for part in parts[1:]:
        part = part.to(acc.dtype)
        if op == dist.ReduceOp.SUM or op == dist.ReduceOp.AVG:
            acc = acc | part if dtype == torch.bool else acc + part
        elif op == dist.ReduceOp.PRODUCT:
            acc = acc & part if dtype == torch.bool else acc * part
        elif op == dist.ReduceOp.MIN:
            acc = torch.minimum(acc, part)
        elif op == dist.ReduceOp.MAX:
            acc = torch.maximum(acc, part)
        elif op == dist.ReduceOp.BAND:
            acc = acc & part
        elif op == dist.ReduceOp.BOR:
            acc = acc | part
        else:
            acc = acc ^ part
    if op == dist.ReduceOp.AVG and dtype.is_complex:
        acc = torch.view_as_complex(torch.view_as_real(acc) / len(parts))
    elif op == dist.ReduceOp.AVG:
        acc = acc / len(parts) if acc.is_floating_point() else acc // len(parts)
    return acc.to(dtype)


def _operations(dtype):
    ops = [dist.ReduceOp.SUM]
    if dtype != torch.bool:
        ops.append(dist.ReduceOp.AVG)
    if not dtype.is_complex:  # torch refuses the others itself
        ops += [dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
    if ON_CPU and not dtype.is_floating_point and not dtype.is_complex:
        ops += [dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR]
    return ops


def _same(actual, expected):
    if actual.dtype.is_complex:
        actual, expected = torch.view_as_real(actual), torch.view_as_real(expected)
    if ON_CPU or not actual.is_floating_point():
        return torch.equal(actual, expected)  # the same bits
    few = 4 * torch.finfo(actual.dtype).eps  # a mean over three ranks is rounded in another way
    return torch.allclose(actual, expected, rtol=few, atol=few)


def _reductions(rank, world_size, seed, rounds):
    rng = random.Random(seed)
    for index in range(rounds):
        dtype, numel = rng.choice(REDUCED), rng.choice(SIZES)
        op = rng.choice(_operations(dtype))
        kind = rng.choice(["all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor", "coalesced"])
        root = rng.randrange(world_size)
        where = f"seed {seed} round {index}: {kind} {dtype} {numel} {op} root {root}"
        parts = [_data(seed * 1000 + index, r, numel, dtype) for r in range(world_size)]
        mine = parts[rank].clone()
        if kind == "all_reduce":
            dist.all_reduce(mine, op)
            assert _same(mine, _expected(op, parts)), where
        elif kind == "reduce":
            dist.reduce(mine, root, op)
            assert _same(mine, _expected(op, parts) if rank == root else parts[rank]), where
        elif kind == "coalesced":
            others = [_data(seed * 1000 + index, 50 + r, 77, dtype) for r in range(world_size)]
            second = others[rank].clone()
            dist.distributed_c10d.all_reduce_coalesced([mine, second], op)
            assert _same(mine, _expected(op, parts)) and _same(second, _expected(op, others)), where
        else:
            flats = [_data(seed * 1000 + index, r, numel * world_size, dtype) for r in range(world_size)]
            expected = _expected(op, [f.view(world_size, numel)[rank] for f in flats])
            is_in_place = index % 3 == 0
            output = flats[rank].view(world_size, numel)[rank] if is_in_place else torch.empty(numel, dtype=dtype)
            if kind == "reduce_scatter":
                dist.reduce_scatter(output, list(flats[rank].view(world_size, numel).unbind()), op)
            else:
                dist.reduce_scatter_tensor(output, flats[rank], op)
            assert _same(output, expected), where
    return True


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_reductions_equal_the_sum_in_rank_order_for_every_dtype_and_operation(world_size):
    assert all(run_ranks(_reductions, world_size, "farandole", timeout=120, seed=world_size, rounds=ROUNDS))


INTEGERS = [
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64,
]  # fmt: skip
NOT_IN_NCCL = [torch.int16, torch.uint16]


def _wrapped(op, parts):
    """In integers without bounds, which are cut to the dtype's once they are summed or multiplied."""
    limits = numpy.iinfo(parts[0].dtype)
    whole = [part.astype(object) for part in parts]
    result = math.prod(whole) if op == dist.ReduceOp.PRODUCT else sum(whole)
    result = (result - limits.min) % (1 << limits.bits) + limits.min
    if op == dist.ReduceOp.AVG:
        result = [abs(value) // len(parts) * (1 if value > 0 else -1) for value in result]
    return numpy.array(result, dtype=parts[0].dtype)


def _overflow(rank, world_size, seed):
    dtypes = [dtype for dtype in INTEGERS if ON_CPU or dtype not in NOT_IN_NCCL]
    no_factor = "PREMUL_SUM is not defined for dtype" if ON_CPU else "PREMUL_SUM of .* on CUDA"
    for index, (dtype, numel) in enumerate((dtype, numel) for dtype in dtypes for numel in (7, 3001)):
        rng = numpy.random.default_rng(seed + index)
        limits = torch.iinfo(dtype)
        name = str(dtype).partition(".")[2]
        parts = [rng.integers(limits.min, limits.max, numel, name, endpoint=True) for _ in range(world_size)]
        for part in parts:  # also where each of them is at an end
            part[: numel // 2] = rng.choice([limits.min, limits.max], numel // 2)
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.AVG):
            mine = torch.from_numpy(parts[rank].copy()).to(DEVICE)
            dist.all_reduce(mine, op)
            expected = _wrapped(op, parts)
            assert (mine.cpu().numpy() == expected).all(), (seed, dtype, op, mine, expected)
        with pytest.raises(TypeError if ON_CPU else ValueError, match=no_factor):
            dist.all_reduce(mine, dist._make_nccl_premul_sum(2.0))
    return True


TWO_HOSTS = [pytest.param(hosts, marks=only_on_cpu("to NCCL hosts are nothing")) for hosts in ((0, 1), (0, 0, 1, 1))]


@pytest.mark.parametrize("hosts", [(0, 0), (0, 0, 0), *TWO_HOSTS], ids=str)
def test_integers_wrap_around_as_twos_complement(hosts):
    seed = random.randrange(1 << 30)
    print("seed", seed)
    assert all(run_ranks(_overflow, len(hosts), "farandole", enter=PretendHost(hosts), seed=seed))


def _subnormals(rank, world_size):
    """The loop reduces for who does not wait, the caller for who does; torch's setting is of the caller's thread."""
    assert torch.set_flush_denormal(True)
    for dtype, bits in ((torch.float32, torch.int32), (torch.float64, torch.int64)):
        for numel in (16, 5000, 300_000):
            tensor = torch.zeros(numel, dtype=dtype)
            tensor.view(bits).fill_(3 + rank)
            dist.barrier()
            if rank == 0:
                work = dist.all_reduce(tensor, async_op=True)
                time.sleep(0.1)
                work.wait()
            else:
                time.sleep(0.05)
                dist.all_reduce(tensor)
            want = sum(3 + each for each in range(world_size))
            assert tensor.view(bits).unique().tolist() == [want], (rank, dtype, numel)
    return True


@only_on_cpu("on GPUs torch's setting has no effect")
@pytest.mark.parametrize("hosts", [(0, 0), (0, 0, 0), (0, 1), (0, 0, 1, 1)], ids=str)
def test_subnormal_numbers_are_added_up_alike_by_whichever_thread(hosts):
    assert all(run_ranks(_subnormals, len(hosts), "farandole", enter=PretendHost(hosts)))


def _movement(rank, world_size, seed, rounds):
    rng = random.Random(seed)
    for index in range(rounds):
        dtype, numel = rng.choice(DTYPES), rng.choice(SIZES)
        kind = rng.choice(["broadcast", "all_gather", "all_gather_tensor", "gather", "scatter", "a2a", "a2a_single"])
        root = rng.randrange(world_size)
        where = f"seed {seed} round {index}: {kind} {dtype} {numel} root {root}"
        parts = [_data(seed * 1000 + index, r, numel, dtype) for r in range(world_size)]
        outputs = [torch.empty(numel, dtype=dtype) for _ in range(world_size)]

        def own_place(place, index=index, part=parts[rank]):
            """What this rank gives: where it is, or where what it gives itself belongs."""
            return place.copy_(part) if index % 3 == 0 else part

        if kind == "broadcast":
            mine = parts[rank].clone()
            dist.broadcast(mine, root)
            assert torch.equal(mine, parts[root]), where
        elif kind == "all_gather":
            dist.all_gather(outputs, parts[rank])
            assert all(map(torch.equal, outputs, parts)), where
        elif kind == "all_gather_tensor":
            flat = torch.empty(numel * world_size, dtype=dtype)
            dist.all_gather_into_tensor(flat, own_place(flat.view(world_size, numel)[rank]))
            assert torch.equal(flat, torch.cat(parts)), where
        elif kind == "gather":
            dist.gather(own_place(outputs[rank]), outputs if rank == root else None, dst=root)
            assert rank != root or all(map(torch.equal, outputs, parts)), where
        elif kind == "scatter":
            output = parts[rank] if index % 3 == 0 and rank == root else outputs[0]
            dist.scatter(output, parts if rank == root else None, src=root)
            assert torch.equal(output, parts[rank]), where
        elif kind == "a2a":
            sizes = [[rng.choice([0, 1, 5, 900]) for _ in range(world_size)] for _ in range(world_size)]
            full = [
                [_data(index, 10 * i + j, sizes[i][j], dtype) for j in range(world_size)] for i in range(world_size)
            ]
            received = [torch.empty(sizes[i][rank], dtype=dtype) for i in range(world_size)]
            dist.all_to_all(received, full[rank])
            assert all(torch.equal(received[i], full[i][rank]) for i in range(world_size)), where
        else:
            sizes = [[rng.choice([0, 1, 5, 900]) for _ in range(world_size)] for _ in range(world_size)]
            full = [
                [_data(index, 10 * i + j, sizes[i][j], dtype) for j in range(world_size)] for i in range(world_size)
            ]
            received = torch.empty(sum(sizes[i][rank] for i in range(world_size)), dtype=dtype)
            dist.all_to_all_single(
                received, torch.cat(full[rank]), [sizes[i][rank] for i in range(world_size)], sizes[rank]
            )
            assert torch.equal(received, torch.cat([full[i][rank] for i in range(world_size)])), where
    return True


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_collectives_that_move_data_deliver_every_byte(world_size):
    assert all(run_ranks(_movement, world_size, "farandole", timeout=120, seed=40 + world_size, rounds=ROUNDS))


def _against_gloo(rank, world_size, seed):
    gloo = dist.new_group(backend="gloo")
    rng = random.Random(seed)
    for index in range(60):
        dtype = rng.choice([torch.float32, torch.float64, torch.int32, torch.int64])
        ours = _data(seed * 77 + index, rank, rng.choice(SIZES), dtype)
        theirs = ours.clone()
        op = rng.choice([dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN])
        dist.all_reduce(ours, op)
        dist.all_reduce(theirs, op, group=gloo)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    return True


@only_on_cpu("tests/python/gpu/test_reductions has it on GPUs")
def test_all_reduce_equals_gloo():
    assert all(run_ranks(_against_gloo, 3, "farandole", timeout=120, seed=5))


def _same_bits(rank, world_size):
    results = []
    for numel in (5, 5000, 500_000):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            x = (torch.randn(numel, generator=seeded(rank)) * 100).to(dtype)
            dist.all_reduce(x)
            results.append(x)
    return [x.view(torch.uint8).cpu().numpy().tobytes() for x in results]


def test_reduced_results_are_the_same_bits_on_every_rank():
    first, *others = run_ranks(_same_bits, 4, "farandole")
    assert all(other == first for other in others)


def _async_and_objects(rank, world_size):
    tensors = [torch.full((n,), float(rank + 1)) for n in (1, 1000, 200_000)]
    works = [dist.all_reduce(t, async_op=True) for t in tensors]
    total = sum(range(1, world_size + 1))
    for work, tensor in reversed(list(zip(works, tensors))):
        work.wait()
        assert torch.all(tensor == total)
    x = torch.ones(3)
    future = dist.all_reduce(x, async_op=True).get_future()
    assert future.then(lambda f: f.value()[0] * 2).wait().tolist() == [2.0 * world_size] * 3
    gathered = [None] * world_size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank * 1000})
    assert [g["rank"] for g in gathered] == list(range(world_size))
    box = [{"from": 0}] if rank == 0 else [None]
    dist.broadcast_object_list(box, src=0)
    assert box == [{"from": 0}]
    dist.barrier()
    return True


def test_asynchronous_work_futures_and_object_collectives():
    assert all(run_ranks(_async_and_objects, 3, "farandole"))
