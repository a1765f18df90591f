"""Training with farandole's DDP equals training with torch's over gloo, on random models."""

from __future__ import annotations

import contextlib
import copy
import itertools
import random

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS, RandomModel, fewer, grads, perturb
from torch.nn.parallel import DistributedDataParallel as TorchDdp
from torch.utils.checkpoint import checkpoint

from farandole.ddp import DistributedDataParallel
from support.devices import backend_for, seeded
from support.processes import run_ranks

STEPS = 3


def _step(model, optimizer, batches, zero: str):
    """One optimizer step over the batches, synchronized in the last; returns the gradients it used."""
    if zero == "buffer" and isinstance(model, DistributedDataParallel):
        model.zero_grad_buffer()
    else:
        optimizer.zero_grad(set_to_none=zero == "none")
    for i, batch in enumerate(batches):
        last = i == len(batches) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            model(batch).backward()
    result = {name: None if grad is None else grad.clone() for name, grad in grads(model).items()}
    optimizer.step()
    return result


def _local_scale(model, batches) -> dict[str, float]:
    """Per parameter, the largest gradient entry of any rank and any batch's sum so far: the unit of rounding errors."""
    plain = copy.deepcopy(model)
    plain.zero_grad(set_to_none=True)
    largest = {}
    for batch in batches:
        plain(batch).backward()
        for name, grad in grads(plain).items():
            if grad is not None and grad.numel():
                largest[name] = max(largest.get(name, 0.0), grad.abs().max().item())
    for name in grads(plain):  # of all: what one rank has used another may not have
        bound = torch.tensor(largest.get(name, 0.0))
        dist.all_reduce(bound, op=dist.ReduceOp.MAX)
        largest[name] = bound.item()
    return largest


def _train_both(rank: int, world_size: int, seeds: list[int]) -> int:
    oracle_group = dist.new_group(backend=backend_for("gloo"))
    compared = 0
    for seed in seeds:
        rng = random.Random(seed)
        branches = rng.random() < 0.5
        model = RandomModel(seed, branches)
        expected_model = copy.deepcopy(model)
        perturb(model, rank)
        expected = TorchDdp(expected_model, process_group=oracle_group, find_unused_parameters=branches)
        bucket_size, overlaps = rng.choice([1, 100, 1000, None]), rng.random() < 0.7
        actual = DistributedDataParallel(
            model, bucket_size=bucket_size, overlap_grad_reduce=overlaps, find_unused_parameters=branches
        )
        momentum = rng.choice([0.0, 0.9])
        optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3, momentum=momentum) for m in (expected, actual)]
        accumulate = rng.randint(1, 4)
        zero = rng.choice(["none", "zero", "buffer"])
        for step in range(STEPS):
            where = (
                f"seed {seed} step {step} rank {rank} accumulate {accumulate} zero {zero} overlaps {overlaps} "
                f"branches {branches}"
            )
            batches = [model.batch(seed, step, rank, i) for i in range(accumulate)]
            scale = _local_scale(model, batches) if world_size > 2 else {}
            want = _step(expected, optimizers[0], batches, zero)
            got = _step(actual, optimizers[1], batches, zero)
            assert want.keys() == got.keys()
            for name, expected_grad in want.items():
                assert (expected_grad is None) == (got[name] is None), f"{where} {name}"
                if expected_grad is None:
                    continue
                compared += 1
                if world_size <= 2:  # one sum of two: the same bits
                    assert torch.equal(expected_grad, got[name]), f"{where} {name}"
                else:  # sums of more come in an order that depends on the place in the bucket
                    limit = 8 * torch.finfo(expected_grad.dtype).eps * scale[name]
                    error = (expected_grad - got[name]).abs().max().item()
                    assert error <= limit, f"{where} {name}: error {error}, limit {limit}"
            if world_size <= 2:
                assert all(map(torch.equal, expected.parameters(), actual.parameters())), where
            else:  # keep rounding from growing over the steps
                actual.load_state_dict(expected.state_dict())
                optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    return compared


@pytest.mark.sample(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_random_models_train_as_under_torch_ddp(backend, world_size):
    first = random.SystemRandom().randrange(10**6)
    seeds = list(range(first, first + fewer(12)))
    print(f"seeds {seeds[0]} to {seeds[-1]}")
    compared = run_ranks(_train_both, world_size, backend, timeout=120, seeds=seeds)
    assert min(compared) >= 2 * len(seeds) * STEPS


class _Checkpointed(torch.nn.Module):
    def __init__(self, reentrant: bool, head: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))
        self.head = torch.nn.Linear(6, 2) if head else torch.nn.Identity()
        self.reentrant = reentrant

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x).square().sum()


def _train_checkpointed(rank: int, world_size: int) -> None:
    for reentrant, head, bucket_size in itertools.product((True, False), (True, False), (1, 100000)):
        model = _Checkpointed(reentrant, head)
        expected = TorchDdp(copy.deepcopy(model))
        actual = DistributedDataParallel(model, bucket_size=bucket_size)
        for step in range(3):
            x = torch.randn(3, 6, generator=seeded(10 * step + rank)).requires_grad_()
            for wrapped in (expected, actual):
                wrapped.zero_grad()
                wrapped(x).backward()
            for name, grad in grads(expected).items():
                where = f"reentrant {reentrant} head {head} bucket_size {bucket_size} step {step} {name}"
                assert torch.equal(grad, grads(actual)[name]), where


def test_checkpointed_models_train_as_under_torch_ddp():
    run_ranks(_train_checkpointed, 2, "gloo")


class _Branches(torch.nn.Module):
    """Which branch runs is told by the input: ranks may differ."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.trunk = torch.nn.Linear(4, 4)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x, branch: int):
        return self.branches[branch](self.trunk(x)).square().sum()


def _train_branches(rank: int, world_size: int) -> None:
    expected = TorchDdp(_Branches(), find_unused_parameters=True)
    actual = DistributedDataParallel(_Branches(), bucket_size=1, unused_parameters="zero_fill")
    for step in range(6):
        branch = (step * (rank + 1)) % 3
        x = torch.randn(2, 4, generator=seeded(step * 2 + rank))
        for wrapped in (expected, actual):
            wrapped.zero_grad()
            wrapped(x, branch).backward()
        for name, grad in grads(expected).items():
            ours = grads(actual)[name]
            # torch leaves what no rank used without a gradient; we count it as zero.
            assert torch.equal(torch.zeros_like(ours) if grad is None else grad, ours), f"step {step} {name}"


def test_zero_fill_equals_torch_ddp_that_looks_for_unused_parameters():
    run_ranks(_train_branches, 2, "gloo")


def _complex_and_empty(rank: int, world_size: int) -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(rank)
            self.z = torch.nn.Parameter(torch.randn(5, dtype=torch.complex64))
            self.empty = torch.nn.Parameter(torch.zeros(0, 3))

        def forward(self, x):
            return (self.z * x).abs().square().sum() + self.empty.sum()

    model = Model()
    expected, actual = TorchDdp(copy.deepcopy(model)), DistributedDataParallel(model, bucket_size=1)
    assert torch.equal(expected.module.z, actual.module.z)
    for wrapped in (expected, actual):
        wrapped(rank + torch.arange(5)).backward()
    assert torch.equal(expected.module.z.grad, actual.module.z.grad)
    assert actual.module.empty.grad.shape == (0, 3)


def test_complex_and_empty_parameters_are_reduced():
    run_ranks(_complex_and_empty, 2, "gloo")


class _TwoHeads(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x), self.second(x)


def _losses_one_by_one(rank: int, world_size: int) -> None:
    batches = [torch.randn(5, 4, generator=seeded(10 * step + rank)) for step in range(STEPS)]

    def train(model):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for batch in batches:
            optimizer.zero_grad()
            for output in model(batch):
                output.square().mean().backward()
            optimizer.step()
        return list(model.parameters())

    expected = train(TorchDdp(_TwoHeads(), process_group=dist.new_group(backend=backend_for("gloo"))))
    for told in ({"unused_parameters": "skip"}, {"unused_parameters": "zero_fill"}, {"find_unused_parameters": True}):
        assert all(map(torch.equal, expected, train(DistributedDataParallel(_TwoHeads(), **told)))), told
    with pytest.raises(RuntimeError, match=r"'second.weight', 'second.bias'.*pass unused_parameters='zero_fill' or"):
        train(DistributedDataParallel(_TwoHeads()))


def test_losses_of_one_forward_are_differentiated_one_by_one_where_that_is_told():
    run_ranks(_losses_one_by_one, 2, "farandole", timeout=60)
