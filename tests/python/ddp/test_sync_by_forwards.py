"""Which backwards average: those that come to an output of a forward outside no_sync(), on all ranks, whatever they find."""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS, fewer
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from farandole import pipelining
from farandole.ddp import DistributedDataParallel
from support.devices import DEVICE, backend_for, seeded
from support.processes import run_ranks

_WIDTH, _BRANCHES = 12, 3


class _Branches(torch.nn.Module):
    """The caller says which branches run; without any no parameter does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_BRANCHES))

    def forward(self, x: torch.Tensor, *taken: int) -> torch.Tensor:
        y = 2 * x
        for branch in taken:
            y = y + torch.tanh(self.branches[branch](x))
        return y.square().mean()


def _batch(seed: int, step: int, rank: int, number: int) -> torch.Tensor:
    return torch.randn(2, _WIDTH, generator=seeded(hash((seed, step, rank, number)))).requires_grad_()


def _programs(rank: int, world_size: int, seeds: list[int], options: dict[str, Any]) -> None:
    """Random forwards, some in no_sync(), in random backwards, the last of which has one that synchronizes."""
    for seed in seeds:
        pick = random.Random(seed)
        model = DistributedDataParallel(_Branches(), **options)
        for step in range(fewer(4)):
            model.zero_grad()
            plain = copy.deepcopy(model.module)
            plain.zero_grad()
            count = pick.randint(1, 4)
            ends = [*sorted(pick.sample(range(1, count), pick.randint(0, count - 1))), count]
            backwards = [list(range(a, b)) for a, b in zip([0, *ends], ends, strict=False)]
            pick.shuffle(backwards)
            syncs = [pick.random() < 0.4 for _ in range(count)]
            syncs[pick.choice(backwards[-1])] = True
            branches = [pick.sample(range(_BRANCHES), pick.randint(0, _BRANCHES)) for _ in range(count)]
            where = f"seed {seed}, {options}, step {step}, rank {rank}: {backwards}, {syncs}, {branches}"
            losses = []
            for number, is_synced in enumerate(syncs):
                model.require_backward_grad_sync = is_synced  # what no_sync() sets
                losses.append(model(_batch(seed, step, rank, number), *branches[number]))
                if rank == 0 or world_size == 1:
                    for each in range(world_size):
                        plain(_batch(seed, step, each, number), *branches[number]).div(world_size).backward()
            for numbers in backwards:
                sum(losses[number] for number in numbers).backward()
            for (name, parameter), wanted in zip(model.module.named_parameters(), plain.parameters(), strict=True):
                want = torch.zeros_like(parameter) if wanted.grad is None else wanted.grad
                dist.broadcast(want, 0)
                got = torch.zeros_like(want) if parameter.grad is None else parameter.grad
                torch.testing.assert_close(got, want, msg=lambda text, n=name, w=where: f"{w}, {n}: {text}")


_OPTIONS: list[dict[str, Any]] = [
    {"unused_parameters": "skip", "bucket_size": 20},
    {"unused_parameters": "zero_fill", "bucket_size": 20, "gradient_as_bucket_view": True},
    {"unused_parameters": "skip", "overlap_grad_reduce": False},
]


@pytest.mark.parametrize("options", _OPTIONS, ids=lambda one: "-".join(map(str, one.values())))
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_last_backward_averages_all_where_a_forward_of_it_was_outside_no_sync(backend, options):
    first = random.SystemRandom().randrange(10**6)
    print(f"seeds from {first}")
    seeds = list(range(first, first + fewer(12)))
    run_ranks(_programs, 2, backend, timeout=90, seeds=seeds, options=options)


def _as_torch(rank: int, world_size: int) -> None:
    gloo = dist.new_group(backend=backend_for("gloo"))
    models = [TorchDdp(_Branches(), process_group=gloo), DistributedDataParallel(_Branches(), bucket_size=20)]
    for step, orders in enumerate(
        [(True, False), (False, True), (True, False, False), (False, True, False), (True, True)]
    ):
        for model in models:
            model.zero_grad()
            losses = []
            for number, is_synced in enumerate(orders):
                x = _batch(0, step, rank, number)
                taken = [number] if len(orders) == _BRANCHES else range(_BRANCHES)  # each by one forward alone
                with contextlib.nullcontext() if is_synced else model.no_sync():
                    losses.append(model(x, *taken))
            sum(losses).backward()
        for (name, want), got in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(got.grad, want.grad, msg=f"{orders}, rank {rank}, {name}")


def test_forwards_in_and_outside_no_sync_before_one_backward_are_averaged_as_by_torch():
    run_ranks(_as_torch, 2, BACKENDS[-1], timeout=60)


def _no_parameter(rank: int, world_size: int, policy: str) -> None:
    model = DistributedDataParallel(_Branches(), unused_parameters=policy)
    for bare in ((0, 1), (0,), (1,)):  # the ranks whose backward comes to no parameter
        model.zero_grad()
        x = _batch(0, 0, rank, 0)
        with model.no_sync():
            model(x, 0, 1, 2).backward()
        local = [parameter.grad.clone() for parameter in model.parameters()]
        taken = () if rank in bare else (0, 1, 2)
        if rank not in bare:
            plain = copy.deepcopy(model.module)
            plain.zero_grad()
            plain(_batch(0, 1, rank, 0), *taken).backward()
            local = [a + b.grad for a, b in zip(local, plain.parameters(), strict=True)]
        loss = model(_batch(0, 1, rank, 0), *taken)
        if policy == "error":
            with pytest.raises(RuntimeError, match=r"6 of 6 parameters got no gradient .*'branches\.0\.weight'"):
                loss.backward()
        else:
            loss.backward()
        for got, want in zip(model.parameters(), local, strict=True):
            dist.all_reduce(want)
            torch.testing.assert_close(got.grad, want / world_size, msg=f"{policy}, bare {bare}, rank {rank}")


@pytest.mark.parametrize("policy", ["error", "zero_fill", "skip"])
def test_a_backward_that_comes_to_no_parameter_reduces_what_there_is_and_the_policy_tells(policy):
    run_ranks(_no_parameter, 2, BACKENDS[-1], timeout=60, policy=policy)


def _others(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(_Branches())
    x = _batch(0, 0, rank, 0)
    loss = model(x, 0, 1, 2)
    (by_grad,) = torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward(inputs=[x], retain_graph=True)
    torch.testing.assert_close(x.grad, by_grad)
    assert model._reducer.rounds() == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    loss.backward(inputs=list(model.parameters()))
    assert model._reducer.rounds() == 1
    model.requires_grad_(False)  # a discriminator, while its generator is trained
    model.module(x, 0).backward()
    assert model._reducer.rounds() == 1


def test_backwards_for_others_than_parameters_reduce_nothing():
    run_ranks(_others, 2, BACKENDS[-1], timeout=60)


class _SometimesBare(torch.nn.Module):
    """A stage whose parameters are taken in every second microbatch alone, on replicas that are told so."""

    def __init__(self, is_bare: bool) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layer = torch.nn.Linear(_WIDTH, _WIDTH)
        self.is_bare, self.calls = is_bare, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return 2 * x if self.is_bare and self.calls % 2 == 0 else self.layer(x)


def _pipeline(rank: int, world_size: int, bare: tuple[int, ...], policy: str) -> None:
    alone = [dist.new_group([each]) for each in range(world_size)][rank]
    module = _SometimesBare(rank in bare)
    model = DistributedDataParallel(module, unused_parameters=policy)
    stage = pipelining.PipelineStage(model, 0, 1, DEVICE, group=alone)
    schedule = pipelining.ScheduleGPipe(stage, 2, torch.nn.MSELoss())
    for step in range(2):
        x = torch.cat([_batch(1, step, rank, number).detach() for number in range(2)])
        plain = _SometimesBare(rank in bare)
        for one in x.chunk(2):
            torch.nn.functional.mse_loss(plain(one.requires_grad_()), torch.ones_like(one)).div(2).backward()
        model.zero_grad()
        schedule.step(x.requires_grad_(), target=torch.ones_like(x))
        for got, want in zip(module.parameters(), plain.parameters(), strict=True):
            dist.all_reduce(want.grad)
            torch.testing.assert_close(got.grad, want.grad / world_size, msg=f"{bare}, step {step}, rank {rank}")
        schedule.step(x, target=torch.ones_like(x), finalize_gradients=False)  # leaves them to a later step
    model.zero_grad()
    module.requires_grad_(False)
    schedule.step(x, target=torch.ones_like(x))
    assert all(parameter.grad is None for parameter in module.parameters())


@pytest.mark.parametrize("policy", ["zero_fill", "skip"])
@pytest.mark.parametrize("bare", [(0, 1), (1,)])
def test_a_step_of_a_pipeline_reduces_though_its_last_backward_comes_to_no_parameter(bare, policy):
    run_ranks(_pipeline, 2, BACKENDS[-1], timeout=60, bare=bare, policy=policy)
