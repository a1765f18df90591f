"""Uneven inputs: join() trains as under torch's DDP, whichever rank runs out first."""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS, fewer, grads
from torch.distributed.algorithms.join import Join, Joinable, JoinHook
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import DEVICE, backend_for, seeded
from support.processes import run_ranks

CASES = fewer(8)


class _Model(torch.nn.Module):
    """Layers with running averages, and branches of which an input picks one."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        torch.manual_seed(rng.randrange(10**6))
        kind = torch.nn.BatchNorm1d if rng.random() < 0.7 else torch.nn.Identity
        self.trunk = torch.nn.Sequential(torch.nn.Linear(4, 6), kind(6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
        self.branches = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(rng.randint(1, 3)))

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](self.trunk(x)).square().mean()


def _loop(model: Any, optimizer: Any, seed: int, rank: int, steps: int, accumulate: int, branches: int) -> list[Any]:
    seen = []
    for step in range(steps):
        optimizer.zero_grad()
        for i in range(accumulate):
            rng = random.Random(hash((seed, step, rank, i)))
            x = torch.randn(3, 4, generator=seeded(rng.randrange(10**6)), dtype=torch.float64)
            with model.no_sync() if i < accumulate - 1 else contextlib.nullcontext():
                model(x, rng.randrange(branches)).backward()
        seen.append({name: None if grad is None else grad.clone() for name, grad in grads(model).items()})
        optimizer.step()
    return seen


def _same(expected: Any, actual: Any, world_size: int) -> bool:
    if actual is None:  # in torch a joined rank goes on telling of the parameters that were used before
        return expected is None or not expected.any()
    if expected is None:
        return False
    if world_size <= 2:  # sums of more come in an order that depends on the place in the bucket
        return torch.equal(expected, actual)
    return torch.allclose(expected, actual, rtol=1e-9, atol=1e-12)


def _train(rank: int, world_size: int, seeds: list[int]) -> None:
    gloo = dist.new_group(backend=backend_for("gloo"))
    for seed in seeds:
        rng = random.Random(seed)
        module = _Model(rng).double()
        several = len(module.branches) > 1
        static = not several and rng.random() < 0.3
        broadcast = rng.random() < 0.8
        buckets = rng.choice([1, 30, None])
        models = [
            TorchDdp(
                copy.deepcopy(module),
                process_group=gloo,
                find_unused_parameters=several,
                broadcast_buffers=broadcast,
            ),
            DistributedDataParallel(
                module,
                find_unused_parameters=several,
                static_graph=static,
                broadcast_buffers=broadcast,
                bucket_size=buckets,
            ),
        ]
        accumulate = rng.choice([1, 1, 2])
        divide = rng.random() < 0.5
        where = f"seed {seed} rank {rank} several {several} static {static} accumulate {accumulate} divide {divide}"
        momentum = 0.0 if several else 0.9  # see _same()
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum) for model in models]
        for loop in range(2):
            # What torch's reducer tells of used parameters before its first backward was never written.
            fewest = 1 if several and loop == 0 else 0
            counts = [rng.randint(fewest, 4) for _ in range(world_size)]
            counts[rng.randrange(world_size)] += 1
            results = []
            for model, optimizer in zip(models, optimizers, strict=True):
                wide = rng.random() < 0.5
                with (
                    Join([model], divide_by_initial_world_size=divide)
                    if wide
                    else model.join(divide_by_initial_world_size=divide)
                ):
                    results.append(
                        _loop(model, optimizer, seed + loop, rank, counts[rank], accumulate, len(module.branches))
                    )
            at = f"{where} loop {loop} counts {counts}"
            for step, (expected, actual) in enumerate(zip(*results, strict=True)):
                for name, grad in expected.items():
                    assert _same(grad, actual[name], world_size), f"{at} step {step} gradient of {name}"
            for name, grad in grads(models[0]).items():
                assert _same(grad, grads(models[1])[name], world_size), f"{at} last gradient of {name}"
            for name, value in models[0].state_dict().items():
                assert _same(value, models[1].state_dict()[name], world_size), f"{at} {name}"


@pytest.mark.sample(4)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_uneven_inputs_train_as_under_torch_ddp(backend, world_size):
    first = random.SystemRandom().randrange(10**6)
    seeds = list(range(first, first + CASES))
    print(f"seeds {seeds[0]} to {seeds[-1]}")
    run_ranks(_train, world_size, backend, timeout=120, seeds=seeds)


class _Counter(Joinable):
    """Another joinable: sums over the ranks that are left in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[float] = []

    def __call__(self) -> None:
        Join.notify_join_context(self)
        self._sum(1.0)

    def _sum(self, value: float) -> None:
        total = torch.tensor(value)
        dist.all_reduce(total)
        self.sums.append(total.item())

    def join_hook(self, **kwargs: Any) -> JoinHook:
        counter = self

        class _Hook(JoinHook):
            def main_hook(self) -> None:
                counter._sum(0.0)

        return _Hook()

    @property
    def join_device(self) -> torch.device:
        return torch.device(DEVICE)

    @property
    def join_process_group(self) -> Any:
        return dist.group.WORLD


def _with_another(rank: int, world_size: int, first: bool) -> None:
    module = torch.nn.Linear(2, 1, bias=False)
    model = DistributedDataParallel(module)
    counter = _Counter()
    with Join([counter, model] if first else [model, counter], divide_by_initial_world_size=False):
        for _ in range(2 + rank):
            model.zero_grad()
            if first:
                counter()
            model(torch.full((1, 2), 1.0 + rank)).sum().backward()
            if not first:
                counter()
    assert counter.sums == [2.0, 2.0, 1.0]
    assert module.weight.grad.tolist() == [[1.5 if rank == 0 else 2.0] * 2]
    model.zero_grad()
    model(torch.full((1, 2), 1.0 + rank)).sum().backward()  # after it all is as before
    assert module.weight.grad.tolist() == [[1.5] * 2]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_it_joins_beside_others(backend, first):
    run_ranks(_with_another, 2, backend, timeout=60, first=first)


def _forwards_only(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(torch.nn.BatchNorm1d(2))
    with model.join():
        for step in range(3 + 2 * rank):
            quiet = torch.no_grad() if step % 2 else contextlib.nullcontext()
            with quiet:
                output = model(torch.randn(3, 2))
            if output.requires_grad:
                output.sum().backward()
    sums = torch.stack([buffer.double().sum() for buffer in model.module.buffers()])
    other = sums.clone()
    dist.broadcast(other, 0)
    assert torch.equal(sums, other)


@pytest.mark.parametrize("backend", BACKENDS)
def test_forwards_without_gradients_need_no_backward_of_the_others(backend):
    run_ranks(_forwards_only, 2, backend, timeout=60)


def _throws(rank: int, world_size: int) -> str:
    model = DistributedDataParallel(torch.nn.Linear(2, 1))
    steps = 0
    try:
        with model.join(throw_on_early_termination=True):
            for _ in range(2 + rank):
                model(torch.ones(1, 2)).sum().backward()
                steps += 1
    except RuntimeError as error:
        assert steps == 2
        with model.join(enable=False):
            model(torch.ones(1, 2)).sum().backward()
        return str(error)
    return ""


@pytest.mark.parametrize("backend", BACKENDS)
def test_all_raise_when_asked_to_once_one_has_no_more_inputs(backend):
    errors = run_ranks(_throws, 2, backend, timeout=60)
    assert errors == [
        "Rank 0 exhausted all inputs.",
        "Detected at least one rank that exhausted inputs. Throwing across all ranks.",
    ]


def _trouble(rank: int, world_size: int) -> str:
    model = DistributedDataParallel(torch.nn.Linear(2, 1), check_for_nan_in_grad=True)
    try:
        with model.join():
            for step in range(1 + rank):
                model(torch.full((1, 2), torch.nan if step else 1.0)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_what_goes_wrong_on_a_rank_that_is_left_is_an_error_on_all():
    for error in run_ranks(_trouble, 2, "gloo", timeout=60):
        assert "rank 1 of the group: the gradient of parameter 'weight' (bucket 0) is NaN somewhere" in error


def _with_copies(
    options: dict[str, Any], others: int = 0
) -> tuple[DistributedDataParallel, list[DistributedOptimizer]]:
    torch.manual_seed(3)
    module = torch.nn.Sequential(torch.nn.Linear(6, 33), torch.nn.Tanh(), torch.nn.Linear(33, 3)).to(torch.bfloat16)
    model = DistributedDataParallel(module, **options)
    return model, [DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05), model) for _ in range(1 + others)]


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=seeded(10 * step + rank)).to(torch.bfloat16)


def _copied_steps(model: Any, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(_batch(rank, step)).float().square().mean().backward()
        optimizer.step()


def _copies(rank: int, world_size: int, options: dict[str, Any], others: int) -> None:
    """Against one process with float32 copies, which adds up the gradients of those that have inputs."""
    model, optimizers = _with_copies(options, others)
    plain = copy.deepcopy(model.module)
    copies = [torch.nn.Parameter(parameter.detach().float()) for parameter in plain.parameters()]
    own = torch.optim.SGD(copies, lr=0.05)
    for first, counts in ((0, [2, 8]), (8, [5, 3]), (16, [1, 1])):
        with model.join() if counts != [1, 1] else contextlib.nullcontext():
            _copied_steps(model, optimizers[0], rank, range(first, first + counts[rank]))
        for step in range(first, first + max(counts)):
            losses = [
                plain(_batch(other, step)).float().square().mean()
                for other, count in enumerate(counts)
                if step < first + count
            ]
            plain.zero_grad()
            for loss in losses:
                (loss / world_size).backward()
            for copied, parameter in zip(copies, plain.parameters(), strict=True):
                copied.grad = parameter.grad.float()
            own.step()
            with torch.no_grad():
                for copied, parameter in zip(copies, plain.parameters(), strict=True):
                    parameter.copy_(copied)
        for ours, theirs in zip(model.module.parameters(), plain.parameters(), strict=True):
            values = [torch.empty_like(ours) for _ in range(world_size)]
            dist.all_gather(values, ours.detach())
            assert torch.equal(*values), f"counts {counts}"
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("options", [{}, {"grad_reduce_in_fp32": True}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_float32_copies_are_those_of_the_last_ones_afterwards(backend, options, others):
    run_ranks(_copies, 2, backend, timeout=60, options=options, others=others)


def _even(rank: int, world_size: int) -> None:
    results = []
    for joins in (False, True):
        model, (optimizer,) = _with_copies({})
        for first in range(0, 6, 2):
            with model.join(enable=joins):
                _copied_steps(model, optimizer, rank, range(first, first + 2))
        results.append([run.tensor.detach() for run in optimizer._runs])
    assert all(torch.equal(*copies) for copies in zip(*results, strict=True))


def test_float32_copies_keep_their_digits_where_inputs_are_even():
    run_ranks(_even, 2, "farandole", timeout=60)


def _refusals(rank: int, world_size: int) -> None:
    sharded = DistributedDataParallel(torch.nn.Linear(2, 1), use_distributed_optimizer=True)
    with pytest.raises(RuntimeError, match=r"join\(\): expected use_distributed_optimizer=False"):
        sharded.join()
    other = dist.new_group([0])
    experts = DistributedDataParallel(torch.nn.Linear(2, 1), expert_process_group=other)
    with pytest.raises(RuntimeError, match=r"join\(\): expected one process group"):
        Join([experts])


def test_what_cannot_join_is_refused_by_name():
    run_ranks(_refusals, 1, "gloo")
