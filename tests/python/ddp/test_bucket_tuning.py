"""bucket_size="auto": measured backwards choose a size that is the same on all ranks, say why, and change no gradient."""

from __future__ import annotations

import copy
import io
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ddp_models import BACKENDS, RandomModel, grads, perturb

from farandole import _C
from farandole.ddp import DistributedDataParallel, DistributedOptimizer, _tuning
from farandole.ddp._tuning import TUNED_ROUNDS
from support.devices import seeded
from support.processes import run_ranks

_LAYERS, _WIDTH, _SLEEP = 6, 512, 0.01
_STEPS = 2 * TUNED_ROUNDS + 1  # with the last one it is chosen


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(_SLEEP)
        return grad


class _Slow(torch.nn.Module):
    """Reductions can be hidden behind what sleeps before each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = _Sleep.apply(layer(x))
        return x.square().mean()


def _tune(rank: int, world_size: int, measured: list[float]) -> tuple[str, str, int, str]:
    sys.stderr = printed = io.StringIO()
    torch.manual_seed(0)
    model = DistributedDataParallel(_Slow(), bucket_size="auto")
    # As if links were slow: 5 ms for 1 MiB, of which each layer's gradients have one. So small buckets save 25 ms, which
    # is worthwhile also where a busy machine takes a second for a backward.
    _tuning._time_reduction = lambda replicas, like, size: 1e-5 + size * 5e-9
    _tuning._time_start = lambda group, like: 1e-5
    _tuning._round_seconds = lambda events: measured.pop(0)
    first = model.bucket_layout()
    x = torch.randn(2, _WIDTH)
    with pytest.raises(ValueError, match="has not chosen a size yet"):
        DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for _ in range(_STEPS):
        assert model.bucket_tuning() is None
        model.zero_grad()
        model(x).backward()
        if rank == 0:
            with torch.no_grad():
                model.module(x)  # one rank's forwards are its own
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.data_ptr() == parameter.main_grad.data_ptr()
    reason = model.bucket_tuning()
    assert reason is not None
    DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    said = [line for line in printed.getvalue().splitlines(True) if line.startswith("farandole")]
    return reason, model.bucket_layout(), first.count("\n"), "".join(said)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_can_be_hidden_gets_smaller_buckets_on_all_ranks_and_the_reason_is_printed(backend):
    (reason, layout, before, printed), *others = run_ranks(_tune, 2, backend, measured=[0.2, 0.1])
    assert before == 1
    assert layout.count("\n") > before, reason
    assert all(other[1] == layout for other in others)
    assert f"({layout.count(chr(10))} buckets): predicted " in reason
    assert "with 40000000 (1 bucket); measured 100 ms for a backward, against 200 ms; a reduction takes " in reason
    assert printed == f"farandole.ddp: {reason}\n"
    assert all(other[3] == "" for other in others)


def test_a_size_with_which_backwards_are_slower_is_not_kept():
    (reason, layout, before, printed), other = run_ranks(_tune, 2, BACKENDS[0], measured=[0.1, 0.2])
    assert layout.count("\n") == before == 1
    assert other[:2] == (reason, layout)
    assert reason.startswith("bucket_size=40000000 (1 bucket) stays: ")
    assert "measured 200 ms for a backward, against 100 ms; a reduction takes " in reason
    assert printed == f"farandole.ddp: {reason}\n"


def test_a_size_with_which_less_than_a_quarter_of_what_was_predicted_shows_is_not_kept():
    # About 25 ms were.
    (reason, layout, before, _), other = run_ranks(_tune, 2, BACKENDS[0], measured=[0.1, 0.0995])
    assert layout.count("\n") == before == 1
    assert other[:2] == (reason, layout)
    assert reason.startswith("bucket_size=40000000 (1 bucket) stays: ")
    assert "but measured 99.5 ms for a backward, against 100 ms" in reason


def _choose_small_buckets(seconds: list[float]) -> None:
    """The choice shall change the buckets, whatever this machine measures."""
    now = SimpleNamespace(bucket_size=40_000_000, buckets=1, exposed=1.0)
    best = SimpleNamespace(bucket_size=16, buckets=2, exposed=0.5)
    choice = SimpleNamespace(now=now, best=best, is_worthwhile=True, backward=1.0)
    _C.choose_bucket_size = lambda reducer, ready, end, points, start: choice
    _tuning._round_seconds = lambda events: seconds.pop(0)


class _Halves(torch.nn.Module):
    """Of which a forward uses one or the other."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor, half: int) -> torch.Tensor:
        return self.halves[half](x).square().sum()


def _skipped(rank: int, world_size: int) -> None:
    _choose_small_buckets([2.0, 1.0])
    torch.manual_seed(0)
    first = _Halves()
    models = [
        DistributedDataParallel(module, bucket_size=size, find_unused_parameters=True)
        for module, size in ((first, "auto"), (copy.deepcopy(first), 16))
    ]
    with pytest.raises(RuntimeError, match=r"record_timeline.*has not chosen yet"), models[0].record_timeline():
        pass
    for step in range(_STEPS + 1):
        x = torch.randn(3, 8, generator=seeded(10 * step + rank))
        for model in models:
            model.zero_grad()
            with model.no_sync():
                model(x, 1).backward()  # all that this half gets
            model(x, 0).backward()
        for (name, ours), theirs in zip(grads(models[0]).items(), grads(models[1]).values()):
            assert torch.equal(ours, theirs), (step, name)
    assert models[0].bucket_layout().count("\n") > 1


def test_what_came_without_synchronizing_is_reduced_by_the_new_buckets_too():
    run_ranks(_skipped, 2, BACKENDS[0])


def _gradients(rank: int, world_size: int, seed: int) -> None:
    tuned, plain = RandomModel(seed), RandomModel(seed)
    perturb(tuned, rank)
    perturb(plain, rank)
    options = {"unused_parameters": "zero_fill"}
    models = [
        DistributedDataParallel(tuned, bucket_size="auto", **options),
        DistributedDataParallel(plain, bucket_size=64, **options),
    ]
    _choose_small_buckets([1.0, 2.0] if seed % 2 else [2.0, 1.0])  # the size does not stay, or stays
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9) for model in models]
    sizes = [40_000_000]
    for step in range(_STEPS + 2):
        if (size := models[0]._tuner._options.bucket_size or sizes[0]) != sizes[-1]:
            sizes.append(size)
        for model, optimizer in zip(models, optimizers):
            if step == TUNED_ROUNDS + 1:
                model.zero_grad_buffer()
            elif step != TUNED_ROUNDS:  # there gradients are kept and added to, while the buckets change
                optimizer.zero_grad(set_to_none=step % 2 == 0)
            with model.no_sync():
                model(model.module.batch(step, rank)).backward()
            model(model.module.batch(step, rank, 1)).backward()
            optimizer.step()
        for (name, ours), (_, theirs) in zip(grads(models[0]).items(), grads(models[1]).items()):
            if ours is not None or theirs is not None:
                assert torch.equal(ours, theirs), (seed, step, name)
    for (name, ours), theirs in zip(tuned.state_dict().items(), plain.state_dict().values()):
        assert torch.equal(ours, theirs), (seed, name)
    assert (" stays: " in models[0].bucket_tuning()) == (seed % 2 == 1)
    assert sizes == [40_000_000, 16] + [40_000_000] * (seed % 2)


@pytest.mark.parametrize("seed", range(4))
def test_gradients_are_those_of_any_other_bucket_size(seed):
    run_ranks(_gradients, 2, BACKENDS[seed // 2 % len(BACKENDS)], seed=seed)


def _refusals(rank: int, world_size: int) -> None:
    for argument in ({"use_distributed_optimizer": True}, {"grad_reduce_in_fp32": True}, {"disable_bucketing": True}):
        with pytest.raises(
            ValueError, match=rf"bucket_size='auto' with {next(iter(argument))}=True: .*expected a number"
        ):
            DistributedDataParallel(torch.nn.Linear(2, 2), bucket_size="auto", **argument)
    with pytest.raises(ValueError, match="bucket_size='auto' with overlap_grad_reduce=False"):
        DistributedDataParallel(torch.nn.Linear(2, 2), bucket_size="auto", overlap_grad_reduce=False)
    with pytest.raises(ValueError, match="bucket_size='small': expected a number of elements or 'auto'"):
        DistributedDataParallel(torch.nn.Linear(2, 2), bucket_size="small")


def test_what_cannot_be_tuned_is_refused_by_name():
    run_ranks(_refusals, 1, BACKENDS[0])
