"""Communication hooks of torch's DDP under farandole's, against torch's over gloo."""

from __future__ import annotations

import copy
import random

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS, fewer, grads
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from farandole.ddp import DistributedDataParallel
from support.devices import ON_CPU, backend_for, seeded
from support.processes import run_ranks

STEPS = 4


def _model(seed: int) -> torch.nn.Module:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    sizes = [8] + [rng.choice([1, 6, 40, 96]) for _ in range(rng.randint(1, 4))]
    return torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)))


def _doubling_hook(group, bucket):
    """The result is a new tensor. Annotations that are strings, as all in this file, torch refuses."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: 2 * future.value()[0])


def _done(result: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future = torch.futures.Future(devices=None if ON_CPU else [result.device])
    future.set_result(result)
    return future


HOOKS = {
    "allreduce": lambda group: (group, default_hooks.allreduce_hook),
    "fp16": lambda group: (group, default_hooks.fp16_compress_hook),
    "bf16": lambda group: (group, default_hooks.bf16_compress_hook),
    "wrapped fp16": lambda group: (group, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)),
    "new tensor": lambda group: (group, _doubling_hook),
}


def _registered(model, group, kind: str) -> None:
    if kind.startswith("builtin"):
        model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind.split()[1]))
    else:
        model.register_comm_hook(*HOOKS[kind](group))


def _compare_hooks(rank: int, world_size: int, kinds: list[str], seeds: list[int], group_of: str) -> None:
    oracle_group = dist.new_group(backend=backend_for("gloo"))
    # bfloat16 over gloo is not in every torch: its sum of two is rounded the same.
    group = dist.group.WORLD
    for seed in seeds:
        for kind in kinds:
            model = _model(seed)
            expected = TorchDdp(copy.deepcopy(model), process_group=oracle_group)
            actual = DistributedDataParallel(model, bucket_size=random.Random(seed).choice([1, 50, 1000, None]))
            _registered(expected, oracle_group, kind)
            _registered(actual, group, kind)
            for step in range(STEPS):
                x = torch.randn(3, 8, generator=seeded(100 * seed + 10 * step + rank))
                for wrapped in (expected, actual):
                    wrapped.zero_grad()
                    wrapped(x).square().sum().backward()
                for name, grad in grads(expected).items():
                    assert torch.equal(grad, grads(actual)[name]), f"{kind} seed {seed} step {step} {name}"


@pytest.mark.parametrize("backend", BACKENDS)
def test_hooks_give_what_they_give_under_torch_ddp(backend):
    first = random.SystemRandom().randrange(10**6)
    print(f"seeds from {first}")
    kinds = [*HOOKS, "builtin ALLREDUCE", "builtin FP16_COMPRESS"]
    run_ranks(_compare_hooks, 2, backend, kinds=kinds, seeds=list(range(first, first + fewer(4))), group_of=backend)


def _power_sgd(rank: int, world_size: int, seed: int) -> None:
    """With one bucket on both sides the same matrices are approximated."""
    oracle_group = dist.new_group(backend=backend_for("gloo"))
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(8, 40), torch.nn.Linear(40, 24))
    expected = TorchDdp(copy.deepcopy(model), process_group=oracle_group)
    actual = DistributedDataParallel(model)
    for wrapped, group in ((expected, oracle_group), (actual, dist.group.WORLD)):
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    compressed = False
    for step in range(6):
        x = torch.randn(3, 8, generator=seeded(100 * seed + 10 * step + rank))
        local = copy.deepcopy(model)
        local.zero_grad()
        local(x).square().sum().backward()
        for wrapped in (expected, actual):
            wrapped.zero_grad()
            wrapped(x).square().sum().backward()
        for (name, grad), exact in zip(grads(expected).items(), local.parameters(), strict=True):
            got = grads(actual)[name]
            torch.testing.assert_close(got, grad, rtol=1e-4, atol=1e-4 * grad.abs().max().item(), msg=f"{step} {name}")
            mean = exact.grad.clone()
            dist.all_reduce(mean)
            compressed = compressed or not torch.allclose(got, mean / world_size, rtol=1e-3)
    assert compressed


def test_power_sgd_approximates_as_under_torch_ddp():
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    run_ranks(_power_sgd, 2, BACKENDS[-1], seed=seed)


class _Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[int, bool, list[tuple[int, ...]], list[tuple[int, ...]]]] = []

    def __call__(self, state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        shapes = [tuple(grad.shape) for grad in bucket.gradients()]
        self.seen.append((bucket.index(), bucket.is_last(), shapes, [tuple(p.shape) for p in bucket.parameters()]))
        return _done(bucket.buffer())


def _see_buckets(rank: int, world_size: int) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(5)))
    wrapped = DistributedDataParallel(model, bucket_size=20)
    x = torch.ones(2, 4)
    wrapped(x).sum().backward()  # learns an order
    wrapped.zero_grad()
    recorder = _Recorder()
    wrapped.register_comm_hook(None, recorder)
    for _ in range(2):
        recorder.seen.clear()
        wrapped.zero_grad()
        wrapped(x * (rank + 1)).sum().backward()
        assert [(index, last) for index, last, *_ in recorder.seen] == [(i, i == 4) for i in range(5)]
        for _, _, shapes, parameters in recorder.seen:
            assert shapes == parameters == [(4,), (4, 4)]
    local = copy.deepcopy(model)
    local.zero_grad()
    local(x * (rank + 1)).sum().backward()
    for mine, expected in zip(model.parameters(), local.parameters(), strict=True):
        assert torch.equal(mine.grad, expected.grad)  # nothing was reduced, or scaled


def test_a_hook_sees_buckets_in_index_order_with_local_gradients():
    run_ranks(_see_buckets, 2, BACKENDS[-1])


def _refusals(rank: int, world_size: int) -> None:
    def hook(state, bucket):
        raise AssertionError("is not called")

    def wrongly_annotated(state: object, bucket: int) -> torch.futures.Future[torch.Tensor]:
        raise AssertionError("is not called")

    def wrong_result(state: object, bucket: dist.GradBucket) -> int:
        raise AssertionError("is not called")

    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="hook=3: expected a callable"):
        model.register_comm_hook(None, 3)
    for wrong, message in (
        (wrongly_annotated, r"annotated as .*int.*: expected torch.distributed.GradBucket"),
        (wrong_result, r"returns .*int.*: expected torch.futures.Future"),
        (lambda x: x, r"expected arguments \(state, bucket\)"),
    ):
        with pytest.raises(ValueError, match=message):
            model.register_comm_hook(None, wrong)
    model.register_comm_hook(None, hook)
    with pytest.raises(RuntimeError, match="register_comm_hook: there is one already"):
        model.register_comm_hook(None, hook)
    sharded = DistributedDataParallel(torch.nn.Linear(2, 2), use_distributed_optimizer=True)
    with pytest.raises(ValueError, match="register_comm_hook with use_distributed_optimizer=True"):
        sharded.register_comm_hook(None, hook)
    expert = torch.nn.Linear(2, 2)
    expert.weight.allreduce = False
    groups = [dist.new_group([r]) for r in range(world_size)]
    with_experts = DistributedDataParallel(expert, expert_process_group=groups[rank])
    with pytest.raises(ValueError, match="register_comm_hook with experts"):
        with_experts.register_comm_hook(None, hook)


def test_hooks_that_cannot_work_are_refused_by_name():
    run_ranks(_refusals, 2, BACKENDS[-1])


def _bad_result(rank: int, world_size: int) -> None:
    def short(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return _done(bucket.buffer()[:1])

    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model.register_comm_hook(None, short)
    with pytest.raises(RuntimeError, match="result for bucket 0 has 1 elements: expected 6"):
        model(torch.ones(1, 2)).sum().backward()


def test_a_result_of_another_size_is_refused():
    run_ranks(_bad_result, 2, BACKENDS[-1])


def _no_future(rank: int, world_size: int, kind: str) -> None:
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    model.register_comm_hook(None, lambda state, bucket: bucket.buffer() if kind == "Tensor" else None)
    with pytest.raises(TypeError, match=f"returned {kind} for bucket 0: expected torch.futures.Future"):
        model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("kind", ["Tensor", "NoneType"])
def test_a_hook_that_returns_no_future_is_told(kind):
    run_ranks(_no_future, 2, BACKENDS[-1], kind=kind)
