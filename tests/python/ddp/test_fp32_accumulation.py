"""A reduce-scatter with float32 accumulation rounds once: against sums in float64, with the bound of one rounding."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import seeded
from support.hosts import PretendHost
from support.processes import run_ranks

_HALF_SPACING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # over the value, of a power of two
_SMALLEST = {torch.bfloat16: 2.0**-134, torch.float16: 2.0**-25}  # half of the spacing of what is denormal
_FLOAT = 2.0**-24


class _Weights(torch.nn.Module):
    """The gradient of each parameter is what is passed for it."""

    def __init__(self, sizes: list[int], dtype: torch.dtype) -> None:
        super().__init__()
        self.all = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes)

    def forward(self, grads: list[torch.Tensor]) -> torch.Tensor:
        return sum(((weight * grad).sum() for weight, grad in zip(self.all, grads, strict=True)), torch.zeros(()))


def _gradients(rng: random.Random, sizes: list[int], dtype: torch.dtype, ranks: int) -> list[list[torch.Tensor]]:
    """By rank. Large ones of one rank cancel those of another, so that what is rounded between is lost."""
    generator = seeded(rng.randrange(2**31))
    of_ranks = [[torch.randn(size, generator=generator) for size in sizes] for _ in range(ranks)]
    for index in range(len(sizes)):
        large = 300 * torch.randn(sizes[index], generator=generator)
        one, other = rng.sample(range(ranks), 2)
        of_ranks[one][index] += large
        of_ranks[other][index] -= large
    return [[grad.to(dtype) for grad in grads] for grads in of_ranks]


def _worst(model: DistributedDataParallel, wanted: list[torch.Tensor], bounds: list[torch.Tensor]) -> float:
    """Of this rank's part of each bucket: the largest error, in parts of what is allowed."""
    group = model.replicas.group
    worst = 0.0
    for bucket in model._reducer.buckets():
        want, bound = (torch.zeros_like(bucket.grads, dtype=torch.float64) for _ in range(2))
        for index, offset, numel in bucket.slots:
            want[offset : offset + numel] = wanted[index]
            bound[offset : offset + numel] = bounds[index]
        got, want, bound = (tensor.chunk(group.size())[group.rank()] for tensor in (bucket.grads, want, bound))
        allowed = bound + _SMALLEST[got.dtype]
        worst = max([worst, *((got.double() - want).abs() / allowed).tolist()])
    return worst


def _sums(
    rank: int, world_size: int, seed: int, cases: list[dict[str, Any]], has_instances: bool = False
) -> list[float]:
    """``has_instances``: of half of the ranks each."""
    found = []
    groups: dict[str, Any] = {}
    if has_instances:
        count = world_size // 2
        instances = [dist.new_group(list(range(first, first + count))) for first in (0, count)]
        groups["process_group"] = instances[rank // count]
        groups["instance_process_group"] = [dist.new_group([own, own + count]) for own in range(count)][rank % count]
    for number, case in enumerate(cases):
        rng = random.Random(seed + number)
        options = dict(case)
        dtype, is_sum = options.pop("dtype"), options.get("calculate_per_token_loss", False)
        sizes = [rng.choice([1, 7, 64, 500]) for _ in range(rng.randint(1, 6))]
        model = DistributedDataParallel(
            _Weights(sizes, dtype),
            use_distributed_optimizer=True,
            bucket_size=rng.choice([1, 300, None]),
            **groups,
            **options,
        )
        assert DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model) is not None
        for _ in range(2):
            of_ranks = _gradients(rng, sizes, dtype, world_size)
            model.zero_grad_buffer()
            model(of_ranks[rank]).backward()
            wanted, bounds = [], []
            for index in range(len(sizes)):
                grads = torch.stack([grads[index].double() for grads in of_ranks])
                scale = 1.0 if is_sum else 1.0 / world_size
                want = grads.sum(0) * scale
                added = grads.abs().sum(0) * scale * _FLOAT * (world_size + 1)
                half = _HALF_SPACING[dtype]
                rounded = want.abs() * half + added * (1 + half)
                if has_instances:  # within one it is rounded, then across
                    parts = torch.stack([part.sum(0) for part in grads.chunk(2)]) * scale
                    rounded = rounded + parts.abs().sum(0) * half * (1 + half)
                wanted.append(want)
                bounds.append(rounded)
            found.append(_worst(model, wanted, bounds))
    return found


def _cases(**fixed: Any) -> list[dict[str, Any]]:
    return [
        {"dtype": dtype, "overlap_grad_reduce": overlaps, "calculate_per_token_loss": is_sum} | fixed
        for dtype, overlaps, is_sum in itertools.product((torch.bfloat16, torch.float16), (False, True), (False, True))
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_a_sum_is_rounded_once(backend, world_size):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    cases = _cases(reduce_scatter_with_fp32_accumulation=True)
    options = {"seed": seed, "cases": cases, "has_instances": world_size == 4}
    for found in run_ranks(_sums, world_size, backend, timeout=60, **options):
        assert max(found) <= 1.0, found


@pytest.mark.parametrize("hosts", [(0, 1), (0, 1, 1), (0, 0, 1, 1), (0, 1, 2, 0)], ids=str)
def test_a_sum_over_several_hosts_is_rounded_once(hosts):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    cases = _cases(reduce_scatter_with_fp32_accumulation=True)
    options = {"seed": seed, "cases": cases, "enter": PretendHost(hosts)}
    for found in run_ranks(_sums, len(hosts), "farandole", timeout=60, **options):
        assert max(found) <= 1.0, found


def test_a_sum_over_instances_of_several_hosts_is_an_average_once():
    """Which are more than one rank each on some host: there the backend does not round once by itself."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    cases = _cases(reduce_scatter_with_fp32_accumulation=True)
    options = {"seed": seed, "cases": cases, "has_instances": True, "enter": PretendHost((0, 0, 1, 0, 0, 1))}
    for found in run_ranks(_sums, 6, "farandole", timeout=90, **options):
        assert max(found) <= 1.0, found


def test_without_it_gloo_rounds_between():
    """What the test above would find."""
    found = run_ranks(_sums, 3, "gloo", timeout=60, seed=1, cases=_cases())
    assert max(map(max, found)) > 3.0


def _trains(rank: int, world_size: int) -> list[list[float]]:
    """Several backwards, some in no_sync: other ranks' parts of earlier rounds are never taken for new ones."""
    torch.manual_seed(3)
    module = torch.nn.Sequential(*[torch.nn.Linear(20, 20, dtype=torch.bfloat16) for _ in range(3)])
    model = DistributedDataParallel(
        module, use_distributed_optimizer=True, bucket_size=100, reduce_scatter_with_fp32_accumulation=True
    )
    optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(6):
        optimizer.zero_grad()
        for micro in range(2):
            x = torch.randn(4, 20, generator=seeded(100 * step + 10 * micro + rank))
            with model.no_sync() if micro == 0 else contextlib.nullcontext():
                model(x.to(torch.bfloat16)).float().square().mean().backward()
        optimizer.step()
    model.start_param_sync(force_sync=True)
    return [parameter.detach().flatten().tolist() for parameter in model.parameters()]


def test_two_ranks_train_to_the_same_bits_over_any_backend():
    """A sum of two values is rounded once by whatever adds them up."""
    results = [result for backend in BACKENDS for result in run_ranks(_trains, 2, backend, timeout=60)]
    assert all(result == results[0] for result in results)


def _refusals(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="reduce_scatter_with_fp32_accumulation=True: expected use_distributed_optim"):
        DistributedDataParallel(torch.nn.Linear(2, 2), reduce_scatter_with_fp32_accumulation=True)
    with pytest.raises(ValueError, match="reduce_scatter_with_fp32_accumulation"):
        DistributedDataParallel(
            torch.nn.Linear(2, 2), use_distributed_optimizer=True, reduce_scatter_with_fp32_accumulation=rank == 0
        )


def test_ranks_must_agree_on_it():
    run_ranks(_refusals, 2, "gloo", timeout=60)
