"""Backward once more without a reset: what torch's DDP adds up is added up, what would be wrong is an error on all ranks."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS, RandomModel, fewer, grads
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import backend_for, seeded
from support.processes import await_all, run_ranks


def _averages(rank: int, world_size: int, seeds: list[int]) -> None:
    gloo = dist.new_group(backend=backend_for("gloo"))
    for seed in seeds:
        rng = random.Random(seed)
        module = RandomModel(seed)
        theirs = TorchDdp(copy.deepcopy(module), process_group=gloo)
        options = rng.choice([{}, {"gradient_as_bucket_view": True}, {"overlap_grad_reduce": False}])
        ours = DistributedDataParallel(module, bucket_size=rng.choice([1, 1000]), **options)
        for step in range(4):
            for model in (theirs, ours):
                model(module.batch(seed, step, rank)).backward()
            actual = grads(ours)
            for name, expected in grads(theirs).items():
                assert (expected is None) == (actual[name] is None), (seed, name)
                if expected is not None:
                    assert torch.equal(actual[name], expected), (seed, step, name, options)
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_averages_are_added_up_as_by_torch(backend):
    first = random.randrange(2**30)
    print(f"seeds from {first}")
    run_ranks(_averages, 2, backend, timeout=90, seeds=[first + i for i in range(fewer(12))])


_TROUBLE = (
    r"rank 1 of the group: parameter '(weight|bias)' gets a gradient while the gradients of the step before are still "
    r"there, which would be summed over the ranks once more: call zero_grad\(\)"
)


def _sums(rank: int, world_size: int, options: dict[str, Any]) -> None:
    torch.manual_seed(1)
    module = torch.nn.Linear(200, 100)  # large ones are reduced where autograd has made them
    plain = copy.deepcopy(module)
    model = DistributedDataParallel(module, calculate_per_token_loss=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    in_main_grad = "grad_reduce_in_fp32" in options

    def batch(of: int) -> torch.Tensor:
        return torch.randn(7, 200, generator=seeded(of))

    def check() -> None:
        plain.zero_grad()
        for other in range(world_size):
            plain(batch(other)).square().sum().backward()
        for mine, expected in zip(module.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine.main_grad if in_main_grad else mine.grad, expected.grad)

    def reset(how: str) -> None:
        if how == "buffer" or in_main_grad:
            model.zero_grad_buffer()
        elif how == "none":
            optimizer.zero_grad()
        elif how == "zero":
            optimizer.zero_grad(set_to_none=False)
        else:
            for parameter in module.parameters():
                parameter.grad.data.zero_()

    for how in ("none", "zero", "data", "buffer"):
        for between in (False, True):  # forward and backward
            if not between:
                reset(how)
            loss = model(batch(rank)).square().sum()
            if between:
                reset(how)
            loss.backward()
            check()
        # One rank forgets it, whatever it does to gradients in between.
        if rank == 0:
            reset(how)
        else:
            model.scale_gradients(0.5)
        with pytest.raises(RuntimeError, match=_TROUBLE) as raised:
            model(batch(rank)).square().sum().backward()
        assert "rank 0" not in str(raised.value)
        with pytest.raises(RuntimeError, match=_TROUBLE):  # and so again: it is not forgiven
            model(batch(rank)).square().sum().backward()
    reset("none")
    loss = model(batch(rank)).square().sum()
    loss.backward(retain_graph=True)
    check()
    with pytest.raises(RuntimeError, match=_TROUBLE):
        loss.backward()
    await_all(rank, world_size)


def _in_no_sync(rank: int, world_size: int, options: dict[str, Any]) -> None:
    """Rank 1 forgets to reset, and its first backward after that is in no_sync."""
    torch.manual_seed(1)
    module = torch.nn.Linear(200, 100)
    model = DistributedDataParallel(module, **options)
    wrapped = torch.optim.SGD(model.parameters(), lr=0.1)
    in_main_grad = "calculate_per_token_loss" not in options or "grad_reduce_in_fp32" in options
    optimizer: Any = DistributedOptimizer(wrapped, model) if in_main_grad else wrapped
    before = [parameter.detach().clone() for parameter in module.parameters()]

    def loss(of: int) -> torch.Tensor:
        return model(torch.randn(7, 200, generator=seeded(of))).square().sum()

    def reset() -> None:
        model.zero_grad()

    def accumulate() -> None:
        with model.no_sync():
            loss(rank).backward()

    loss(rank).backward()
    if rank == 0:
        reset()
    accumulate()
    accumulate()
    with pytest.raises(RuntimeError, match=_MORE) as raised:  # in the backward that all come to
        loss(rank).backward()
    assert "rank 0" not in str(raised.value)
    reset()
    # Where none comes before the optimizer's step, that is where it ends, on the rank that did it.
    loss(rank).backward()
    if rank == 0:
        reset()
    accumulate()
    if rank == 1:
        with pytest.raises(RuntimeError, match=r"step\(\): parameter '(weight|bias)' gets a gradient while"):
            optimizer.step()
        for parameter, old in zip(module.parameters(), before, strict=True):
            assert torch.equal(parameter, old)
    # A reset before the next one is all that is needed.
    reset()
    accumulate()
    loss(rank).backward()
    optimizer.step()
    for parameter in module.parameters():
        of_ranks = [torch.empty_like(parameter) for _ in range(world_size)]
        dist.all_gather(of_ranks, parameter.detach())
        assert torch.equal(*of_ranks)
    await_all(rank, world_size)


_MORE = (
    r"rank 1 of the group: parameter '(weight|bias)' gets a gradient while the gradients of the step before are still"
)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "options",
    [
        {"calculate_per_token_loss": True},
        {"calculate_per_token_loss": True, "gradient_as_bucket_view": True},
        {"calculate_per_token_loss": True, "grad_reduce_in_fp32": True},
        {"use_distributed_optimizer": True},
    ],
    ids=str,
)
def test_a_backward_in_no_sync_that_adds_to_what_was_not_reset_is_told_to_all_ranks(backend, options):
    run_ranks(_in_no_sync, 2, backend, timeout=60, options=options)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}, {"grad_reduce_in_fp32": True}], ids=str)
def test_sums_that_are_not_reset_are_an_error_on_all_ranks(backend, options):
    run_ranks(_sums, 2, backend, timeout=60, options=options)
