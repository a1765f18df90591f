"""What goes wrong with the gradients of one rank alone is one error on all ranks, in that backward, with rank and cause."""

from __future__ import annotations

import copy
import re
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from farandole.ddp import DistributedDataParallel
from support.devices import ON_CPU
from support.processes import await_all, run_ranks

CULPRIT = 1
HOMES: dict[str, dict[str, Any]] = {
    "grad": {},
    "main_grad": {"grad_reduce_in_fp32": True},
    "part of main_grad": {"use_distributed_optimizer": True},
}
TOLD = {
    "sparse": "the gradient of parameter '0.weight' is sparse: expected a dense one",
    "graph": "backward(create_graph=True) is not supported: parameter '2.bias' would get",
    "removed": "the gradient of parameter '1.weight' was removed by a hook",
}


def _words() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(torch.nn.Embedding(5, 6), torch.nn.Linear(6, 6), torch.nn.Linear(6, 6))


def _loss(model: torch.nn.Module, rank: int) -> torch.Tensor:
    return model(torch.tensor([rank, 3, 4])).square().mean()


def _error_of(body: Any) -> Exception | None:
    try:
        body()
    except Exception as error:
        return error
    return None


def _mean_grads(world_size: int) -> dict[str, torch.Tensor]:
    plain = _words()
    sum(_loss(plain, rank) / world_size for rank in range(world_size)).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters()}


def _fails_alone(rank: int, world_size: int, kind: str, options: dict[str, Any]) -> str:
    module: Any = _words()
    module[0].sparse = kind == "sparse" and rank == CULPRIT
    model = DistributedDataParallel(module, bucket_size=30, **options)
    removing = []
    if kind == "removed" and rank == CULPRIT:
        weight = module[1].weight
        removing.append(weight.register_post_accumulate_grad_hook(lambda one: setattr(one, "grad", None)))
    creates = kind == "graph" and rank == CULPRIT
    error = _error_of(lambda: _loss(model, rank).backward(create_graph=creates))
    module[0].sparse = False
    for hook in removing:
        hook.remove()
    model.zero_grad()
    _loss(model, rank).backward()  # the step after is right
    name = "grad" if not options else "main_grad"
    for key, want in _mean_grads(world_size).items():
        got = getattr(module.get_parameter(key), name)
        if "use_distributed_optimizer" not in options:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6, msg=key)
    await_all(rank, world_size)
    return str(error)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("kind", TOLD)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_gradient_that_cannot_count_on_one_rank_is_told_to_all(backend, kind, home):
    for error in run_ranks(_fails_alone, 3, backend, timeout=30, kind=kind, options=HOMES[home]):
        assert error.startswith(f"farandole.ddp: rank {CULPRIT} of the group: {TOLD[kind]}"), error


def _in_no_sync(rank: int, world_size: int) -> None:
    """Nobody waits there: who does it is told at once."""
    module: Any = _words()
    module[0].sparse = True
    model = DistributedDataParallel(module, grad_reduce_in_fp32=True)
    with pytest.raises(RuntimeError, match=r"'0\.weight' is sparse"), model.no_sync():
        _loss(model, rank).backward()
    module[0].sparse = False
    model.zero_grad()
    _loss(model, rank).backward()
    for key, want in _mean_grads(world_size).items():
        torch.testing.assert_close(module.get_parameter(key).main_grad, want, rtol=1e-5, atol=1e-6)


def test_what_cannot_count_in_no_sync_is_told_there():
    run_ranks(_in_no_sync, 2, BACKENDS[-1], timeout=30)


class _Hook:
    """An all-reduce that fails where it is told to."""

    def __init__(self, fails: str) -> None:
        self.fails = fails

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self.fails == "call" and bucket.index() == 1:
            raise ValueError("no luck")

        def finish(done: torch.futures.Future[Any]) -> torch.Tensor:
            if self.fails == "future" and bucket.index() == 1:
                raise ValueError("no luck")
            return done.value()[0] / dist.get_world_size()

        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(finish)


def _hook_fails(rank: int, world_size: int, fails: str, culprits: list[int]) -> tuple[str, str, float]:
    module = _words()
    model = DistributedDataParallel(module, bucket_size=30)
    hook = _Hook(fails if rank in culprits else "")
    model.register_comm_hook(None, hook)
    begun = time.monotonic()
    error = _error_of(_loss(model, rank).backward)
    taken = time.monotonic() - begun
    hook.fails = ""
    after = "usable"
    if len(culprits) == world_size:
        model.zero_grad()
        _loss(model, rank).backward()
        for key, want in _mean_grads(world_size).items():
            torch.testing.assert_close(module.get_parameter(key).grad, want, rtol=1e-5, atol=1e-6, msg=key)
    else:
        after = str(_error_of(lambda: _loss(model, rank)))
    await_all(rank, world_size)
    return f"{type(error).__name__}: {error}", after, taken


@pytest.mark.skipif(not ON_CPU, reason="what is under way on a device is not ended by all backends")
@pytest.mark.parametrize("fails", ["call", "future"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hook_that_fails_on_one_rank_is_told_to_all(backend, fails):
    results = run_ranks(_hook_fails, 3, backend, timeout=40, fails=fails, culprits=[CULPRIT])
    reason = rf"rank {CULPRIT} of the group: its communication hook failed for bucket 1: .*ValueError: no luck"
    for rank, (error, after, taken) in enumerate(results):
        assert re.search("ValueError: no luck" if rank == CULPRIT else reason, error), error
        assert re.search(reason, after), after
        assert taken < 10


@pytest.mark.parametrize("fails", ["call", "future"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_hook_that_fails_on_all_ranks_ends_that_backward_alone(backend, fails):
    for error, after, taken in run_ranks(_hook_fails, 3, backend, timeout=40, fails=fails, culprits=[0, 1, 2]):
        assert "ValueError: no luck" in error
        assert after == "usable"
        assert taken < 2.5  # nobody waits for nobody


def _other_hooks(rank: int, world_size: int) -> None:
    def state(matrix_rank: int) -> powerSGD_hook.PowerSGDState:
        return powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=matrix_rank)

    half = default_hooks.fp16_compress_hook
    other = rank == CULPRIT
    for given, difference in (
        ((None, default_hooks.bf16_compress_hook if other else half), r"fp16_compress_hook; rank 1 has .*bf16_com"),
        ((state(1 + other), powerSGD_hook.powerSGD_hook), r"matrix_approximation_rank: 1; rank 1 has .*: 2"),
        (
            (None, default_hooks.fp16_compress_wrapper(half if other else _Hook(""))),
            r"_Hook; rank 1 has .* of .*fp16_c",
        ),
        ((None, 3 if other else half), "hook=3: expected a callable"),
        ((None, (lambda bucket: bucket) if other else half), "first difference|<lambda>"),
    ):
        model = DistributedDataParallel(_words())
        with pytest.raises((ValueError, TypeError), match=difference):
            model.register_comm_hook(*given)
    for given in ((state(1), powerSGD_hook.powerSGD_hook), (None, _Hook("")), (rank, copy.copy(half))):
        model = DistributedDataParallel(_words())
        model.register_comm_hook(*given)
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_that_register_different_hooks_are_told_all(backend):
    run_ranks(_other_hooks, 3, backend, timeout=40)


def _in_explicit_rounds(rank: int, world_size: int) -> tuple[str, str]:
    module: Any = _words()
    model = DistributedDataParallel(module, bucket_size=30)
    with model.no_sync():
        _loss(model, rank).backward()
    if rank == CULPRIT:
        module[0].weight.grad = torch.ones_like(module[0].weight).to_sparse()
    started = str(_error_of(model.start_grad_sync))
    error = str(_error_of(model.finish_grad_sync))
    model.zero_grad()
    _loss(model, rank).backward()
    for key, want in _mean_grads(world_size).items():
        torch.testing.assert_close(module.get_parameter(key).grad, want, rtol=1e-5, atol=1e-6, msg=key)
    return started, error


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_cannot_count_in_an_explicit_round_is_told_to_all_at_its_end(backend):
    for rank, (started, error) in enumerate(run_ranks(_in_explicit_rounds, 2, backend, timeout=30)):
        assert (TOLD["sparse"] in started) == (rank == CULPRIT), started
        assert error.startswith(f"farandole.ddp: rank {CULPRIT} of the group: {TOLD['sparse']}"), error
