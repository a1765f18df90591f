"""Averages of what is narrower than float, between hosts: in the dtype's range wherever the average is, however they go."""

import random

import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.drawn.memory import bytes_of
from support.hosts import PretendHost
from support.processes import run_ranks

pytestmark = only_on_cpu("NCCL averages in another way")

PLACES = {
    "two hosts with two ranks each": (0, 0, 1, 1),
    "unlike hosts": (0, 1, 0, 0),
    "three hosts": (0, 1, 1, 2),
    "a host for each rank": (0, 1, 2, 3, 4),
}
ALGORITHMS = ["flat", "recursive_doubling", "rabenseifner", "direct", "ring"]
DTYPES = [torch.float16, torch.bfloat16, torch.float8_e5m2, torch.complex32]
SIZES = [1, 7, 1000, 40_000]


def _values(generator, rank, numel, dtype):
    """Of all sizes, up to the largest; every third has one sign on all ranks, so that sums are beyond the dtype."""
    real = dtype.to_real()
    # A float would not hold the sum either of those that bfloat16 has.
    largest = min(torch.finfo(real).max, 1e37)
    values = torch.rand(numel, generator=generator, dtype=torch.float64) * 2 - 1
    exponents = torch.randint(0, 2, (numel,), generator=generator) * torch.rand(numel, generator=generator) * -30
    values = values * largest * torch.exp2(exponents.double())
    values[::3] = (0.9 + 0.1 * rank / 8) * largest
    return values.to(real)


def _draw(seed, rank, numel, dtype):
    generator = torch.Generator().manual_seed(seed * 100 + rank)
    if not dtype.is_complex:
        return _values(generator, rank, numel, dtype)
    parts = [_values(generator, rank, numel, dtype) for _ in range(2)]
    return torch.view_as_complex(torch.stack(parts, -1))


def _double(tensor):
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double()


def _check(result, parts, where):
    """Within the roundings of what goes in steps, each of a number that is no larger than the mean of magnitudes."""
    real = result.dtype.to_real()
    u = torch.finfo(real).eps / 2
    least = torch.finfo(real).smallest_normal * torch.finfo(real).eps
    wide = [_double(part) for part in parts]
    mean = torch.stack(wide).mean(0)
    magnitude = torch.stack(wide).abs().mean(0)
    off = (_double(result) - mean).abs()
    bound = len(parts) * (u * magnitude + least)
    assert bool((off <= bound).all()), f"{where}: {_double(result)[~(off <= bound)][:3]}, {mean[~(off <= bound)][:3]}"


def _average(rank, world_size, seed, rounds):
    choices = random.Random(seed)
    for index in range(rounds):
        dtype, numel = choices.choice(DTYPES), choices.choice(SIZES)
        kind, root = choices.choice(["all_reduce", "reduce", "reduce_scatter"]), choices.randrange(world_size)
        where = f"seed {seed} round {index}: {kind} of {numel} {dtype}, root {root}"
        if kind == "reduce_scatter":
            whole = [_draw(seed + index, r, numel * world_size, dtype) for r in range(world_size)]
            result = torch.empty(numel, dtype=dtype)
            dist.reduce_scatter_tensor(result, whole[rank], dist.ReduceOp.AVG)
            _check(result, [one.view(world_size, numel)[rank] for one in whole], where)
            continue
        parts = [_draw(seed + index, r, numel, dtype) for r in range(world_size)]
        result = parts[rank].clone()
        if kind == "reduce":
            dist.reduce(result, root, dist.ReduceOp.AVG)
        else:
            dist.all_reduce(result, dist.ReduceOp.AVG)
        if kind == "reduce" and rank != root:
            assert torch.equal(bytes_of(result), bytes_of(parts[rank])), where
            continue
        _check(result, parts, where)
        if kind == "all_reduce":
            others = [torch.empty_like(bytes_of(result)) for _ in range(world_size)]
            dist.all_gather(others, bytes_of(result))
            assert all(torch.equal(other, others[0]) for other in others), where
    return True


@pytest.mark.sample(6)
@pytest.mark.parametrize("algorithm", [None, *ALGORITHMS])
@pytest.mark.parametrize("place", PLACES)
def test_an_average_between_hosts_is_in_range_where_that_of_one_host_is(place, algorithm):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    hosts = PLACES[place]
    several = len(set(hosts)) < len(hosts)
    env = {"FARANDOLE_ALGORITHMS": f"all_reduce={'hierarchical/' if several else ''}{algorithm}"} if algorithm else {}
    done = run_ranks(
        _average, len(hosts), "farandole", timeout=120, env=env, enter=PretendHost(hosts), seed=seed, rounds=25
    )
    assert all(done)


def _largest(rank, world_size):
    data = torch.full((3,), 60000, dtype=torch.float16)
    dist.all_reduce(data, dist.ReduceOp.AVG)
    return data.tolist()


@pytest.mark.parametrize("hosts", [None, (0, 0, 1), (0, 1, 1)])
def test_the_average_of_numbers_close_to_the_largest_is_that_number(hosts):
    enter = PretendHost(hosts) if hosts else None
    assert run_ranks(_largest, 3, "farandole", enter=enter) == [[60000.0] * 3] * 3
