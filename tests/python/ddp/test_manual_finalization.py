"""A backward that finalize_backward() ends is one that ends by itself: torch's name for it, from 2.15 on."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from ddp_models import BACKENDS, RandomModel, fewer, grads
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import DEVICE
from support.processes import await_all, run_ranks

_WAYS: dict[str, dict[str, Any]] = {
    "grad": {},
    "view": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "late": {"overlap_grad_reduce": False},
    "skip": {"unused_parameters": "skip"},
    "tuned": {"bucket_size": "auto"},
    "sharded": {"use_distributed_optimizer": True},
}
_IN_BACKWARD = {"grad", "view", "tuned", "sharded"}  # may be ended inside


def _train(rank: int, seed: int, way: str) -> None:
    pick = random.Random(seed)  # the same on all ranks
    models, optimizers = [], []
    for _ in range(2):
        module = RandomModel(seed, branches=way == "skip")
        models.append(DistributedDataParallel(module, **({"bucket_size": 200} | _WAYS[way])))
        plain = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9)
        optimizers.append(DistributedOptimizer(plain, models[-1]) if way == "sharded" else plain)
    by_itself, by_call = models
    for step in range(fewer(12 if way == "tuned" else 6)):
        is_manual = pick.random() < 0.8
        by_call.require_manual_backward_finalization = is_manual
        assert by_call.require_manual_backward_finalization == is_manual
        for optimizer in optimizers:
            optimizer.zero_grad()
        for number in range(pick.randint(0, 1)):  # without a synchronization
            x = by_itself.module.batch(seed, step, rank, number)
            for model in models:
                with model.no_sync():
                    model(x).backward()
        x = by_itself.module.batch(seed, step, rank, 2)
        by_itself(x).backward()
        inside = pick.random() < 0.5
        y = x.detach().requires_grad_() * 1
        if is_manual and inside:
            y.register_hook(lambda _: None if by_call.should_finalize_after_backward else by_call.finalize_backward())
        loss = by_call(y)
        is_late = by_call.should_finalize_after_backward
        where = f"seed {seed}, {way}, step {step}, rank {rank}"
        assert is_late == (is_manual and way not in _IN_BACKWARD), where
        loss.backward()
        if is_manual and (is_late or not inside):
            by_call.finalize_backward()
        got, want = grads(by_call), grads(by_itself)
        for name in want if way != "sharded" else ():
            assert (got[name] is None) == (want[name] is None), f"{where}, {name}"
            if want[name] is not None:
                torch.testing.assert_close(
                    got[name], want[name], rtol=0, atol=0, equal_nan=True, msg=f"{where}, {name}"
                )
        for optimizer in optimizers:
            optimizer.step()
        for one, other in zip(by_itself.parameters(), by_call.parameters(), strict=True):
            torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True, msg=where)


def _all_seeds(rank: int, world_size: int, seeds: list[int], way: str) -> None:
    for seed in seeds:
        _train(rank, seed, way)


@pytest.mark.parametrize("way", list(_WAYS))
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_that_a_call_ends_is_one_that_ends_by_itself(backend, way):
    seeds = [random.randrange(1 << 30) for _ in range(fewer(3))]
    print(f"seeds {seeds}")
    run_ranks(_all_seeds, 2, backend, seeds=seeds, way=way)


def _beside_torchs(rank: int, world_size: int, seed: int) -> None:
    module = RandomModel(seed)
    ours, theirs = DistributedDataParallel(copy.deepcopy(module)), TorchDdp(module)
    for model in (ours, theirs):
        model.require_manual_backward_finalization = True
    for step in range(4):
        x = module.batch(seed, step, rank)
        for model in (ours, theirs):
            model.zero_grad()
            model(x).backward()
            model.finalize_backward()
        for (name, grad), other in zip(grads(ours).items(), grads(theirs).values(), strict=True):
            where = f"seed {seed}, step {step}, {name}"
            assert (grad is None) == (other is None), where
            if grad is not None:
                torch.testing.assert_close(grad, other, rtol=0, atol=0, equal_nan=True, msg=where)


@pytest.mark.skipif(not hasattr(TorchDdp, "finalize_backward"), reason="torch before 2.15 has none")
def test_torchs_gives_the_same():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_ranks(_beside_torchs, 2, "gloo", seed=seed)


def _wrong_calls(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)).to(DEVICE))
    x = torch.ones(1, 2, device=DEVICE)

    def refused(text: str) -> Any:
        return pytest.raises(RuntimeError, match=text)

    with pytest.raises(TypeError, match="require_manual_backward_finalization=1: expected a bool"):
        model.require_manual_backward_finalization = 1
    with refused(r"finalize_backward\(\): expected require_manual_backward_finalization=True"):
        model.finalize_backward()
    assert not model.should_finalize_after_backward
    model.require_manual_backward_finalization = True
    without = r"finalize_backward\(\) without gradients that are to be averaged"
    with refused(without):
        model.finalize_backward()
    with model.no_sync():
        model(x).sum().backward()
        with refused(without):
            model.finalize_backward()
    model(x).sum().backward()
    with refused("require_manual_backward_finalization=False while gradients are reduced"):
        model.require_manual_backward_finalization = False
    model.finalize_backward()
    with refused(without):
        model.finalize_backward()
    early = model.module[0].register_full_backward_pre_hook(lambda *_: model.finalize_backward())
    with refused(r"finalize_backward\(\) inside a backward, with 2 of 4 gradients: expected behind the last one"):
        model(x.clone().requires_grad_()).sum().backward()
    early.remove()
    with refused(r"a forward began before finalize_backward\(\) was called"):
        model(x)
    model(x).sum().backward()
    model.finalize_backward()
    unpickled = copy.deepcopy(model)
    assert unpickled.require_manual_backward_finalization
    unpickled(x).sum().backward()
    unpickled.finalize_backward()
    model.require_manual_backward_finalization = False
    model(x).sum().backward()
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_out_of_turn_are_refused(backend):
    run_ranks(_wrong_calls, 2, backend)


def _missing(rank: int, world_size: int, nothing: bool) -> None:
    """On rank 1 one gradient, or all, are missing."""
    model = DistributedDataParallel(torch.nn.ModuleList([torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)]).to(DEVICE))
    model.require_manual_backward_finalization = True
    model.module.forward = lambda x, used: x.sum() * 0 + sum(layer(x).sum() for layer in model.module[:used])
    used = 2 if rank == 0 else 0 if nothing else 1
    x = torch.ones(1, 2, device=DEVICE, requires_grad=True)
    model(x, used).backward()
    with pytest.raises(
        RuntimeError, match=f"rank 1 of the group: {4 if nothing else 2} of 4 parameters got no gradient"
    ):
        model.finalize_backward()
    await_all(rank, world_size)


@pytest.mark.parametrize("nothing", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_that_are_missing_are_told_at_the_call(backend, nothing):
    run_ranks(_missing, 2, backend, nothing=nothing)
