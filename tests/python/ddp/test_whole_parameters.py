"""Optimizers that look at whole parameters, over sharded models, equal themselves in one process."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_models import BACKENDS, fewer
from optimizer_oracle import Make, Oracle, SmallModel, batch_of, groups_of

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from farandole.ddp._whole import owners_of
from support.devices import DEVICE, only_on_cpu
from support.processes import run_ranks

STEPS = fewer(50)


class ByNorms(torch.optim.Optimizer):
    """The step of a parameter is as long as the parameter: its norms, its shape and a count that is no tensor matter."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                moment = state.setdefault("moment", torch.zeros_like(parameter))
                moment.lerp_(parameter.grad, 0.2)
                rate = group["lr"] * (parameter.norm() + 0.1) / (moment.norm() + 1e-3) / state["count"] ** 0.1
                parameter.sub_(moment * rate / max(1, parameter.dim()))


OPTIMIZERS: list[Make] = [
    lambda groups: torch.optim.Adafactor(groups, lr=1e-2, foreach=True),
    lambda groups: torch.optim.Adafactor(groups, lr=1e-2, foreach=False, weight_decay=0.05),
    lambda groups: ByNorms(groups, lr=1e-2),
]


class ManyShapes(SmallModel):
    """And a parameter of four dimensions."""

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        super().__init__(seed, dtype)
        self.kernel = torch.nn.Parameter(torch.randn(3, self.width, 2, 5).to(dtype) / self.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.einsum("bsw,awcd->bs", x.to(self.dtype), torch.tanh(self.kernel))
        return super().forward(x) + mixed.float().square().mean()


def _make(
    seed: int, rng: random.Random, make: Make, dtype: torch.dtype, bucket_size: int | None, **options: Any
) -> tuple[DistributedDataParallel, DistributedOptimizer, Oracle]:
    in_fp32 = dtype == torch.bfloat16 or (rng.random() < 0.3 and dtype == torch.float32)
    model = DistributedDataParallel(
        ManyShapes(seed, dtype),
        bucket_size=bucket_size,
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=in_fp32,
        overlap_param_gather=rng.random() < 0.5,
        **options,
    )
    inner = make(groups_of(model.module))
    optimizer = DistributedOptimizer(inner, model, is_elementwise=False if isinstance(inner, ByNorms) else None)
    return model, optimizer, Oracle(ManyShapes(seed, dtype), make, torch.float32 if in_fp32 else dtype)


def _trains_alike(rank: int, world_size: int, seeds: list[int]) -> None:
    for seed in seeds:
        rng = random.Random(seed)
        dtype = rng.choice([torch.float64, torch.float32, torch.bfloat16])
        model, optimizer, oracle = _make(seed, rng, rng.choice(OPTIMIZERS), dtype, rng.choice([1, 300, 2000, None]))
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.98) for one in (optimizer, oracle.optimizer)]
        accumulate, max_norm = rng.randint(1, 3), rng.choice([None, 0.1, 10.0])
        for step in range(STEPS):
            where = f"seed {seed} step {step} rank {rank}"
            batches = [
                [batch_of(seed, step, other, i, model.module) for i in range(accumulate)] for other in range(world_size)
            ]
            want = oracle.step(batches, max_norm, 2.0)
            optimizer.zero_grad() if rng.random() < 0.8 else optimizer.zero_grad(set_to_none=False)
            for i, batch in enumerate(batches[rank]):
                with model.no_sync() if i < accumulate - 1 else contextlib.nullcontext():
                    model(batch).backward()
            if max_norm is not None:
                assert optimizer.grad_norm().item() == pytest.approx(want.item(), rel=oracle.tolerance), where
                assert optimizer.clip_grad_norm_(max_norm).item() == pytest.approx(want.item(), rel=oracle.tolerance)
            optimizer.step()
            for scheduler in schedulers:
                scheduler.step()
            if step % 10 == 9:
                model.start_param_sync(force_sync=True)
                oracle.check(model.module, where)


@pytest.mark.sample(3)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_random_models_train_as_under_the_plain_optimizer(backend, world_size):
    first = random.SystemRandom().randrange(10**6)
    seeds = list(range(first, first + (3 if world_size <= 2 else 1)))  # ranks beyond the cores take turns
    print(f"seeds {seeds[0]} to {seeds[-1]}")
    run_ranks(_trains_alike, world_size, backend, timeout=150, seeds=seeds)


def _short(rank: int, world_size: int, seed: int) -> None:
    """Gradients of 16 bits, and parameters of 8 beside others, whose updates come as float32 copies say."""

    def make(module: SmallModel) -> SmallModel:
        module.first.weight = torch.nn.Parameter(module.first.weight.detach().to(torch.float8_e4m3fn))
        module.first.forward = lambda x: torch.nn.functional.linear(  # type: ignore[method-assign]
            x, module.first.weight.to(torch.bfloat16), module.first.bias
        )
        return module

    for in_fp32 in (False, True):
        module = SmallModel(seed, torch.bfloat16)
        model = DistributedDataParallel(
            make(module) if in_fp32 else module,
            bucket_size=200,
            use_distributed_optimizer=True,
            grad_reduce_in_fp32=in_fp32,
        )
        optimizer = DistributedOptimizer(ByNorms(groups_of(model.module), lr=1e-2), model, is_elementwise=False)
        other = SmallModel(seed, torch.bfloat16)
        oracle = Oracle(make(other) if in_fp32 else other, lambda groups: ByNorms(groups, lr=1e-2), torch.float32)
        for step in range(10):
            batches = [[batch_of(seed, step, other, 0, model.module)] for other in range(world_size)]
            want = oracle.step(batches, 0.5, 2.0)
            optimizer.zero_grad()
            model(batches[rank][0]).backward()
            assert optimizer.clip_grad_norm_(0.5).item() == pytest.approx(want.item(), rel=3e-2)
            optimizer.step()
        assert all(run.tensor.dtype == torch.float32 for run in optimizer._runs)
        for (name, want), got in zip(oracle.module.named_parameters(), model.module.parameters(), strict=True):
            allowed = 0.1 if want.dtype == torch.float8_e4m3fn else 3e-2
            error = (want.double() - got.double()).abs().max().item()
            assert error <= allowed * (1 + want.double().abs().max().item()), f"{name}: {error}"


def test_short_gradients_and_parameters_have_float32_copies():
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    run_ranks(_short, 3, BACKENDS[-1], timeout=60, seed=seed)


def _muon(rank: int, world_size: int, seed: int) -> None:
    """Muon over matrices, AdamW over the rest: two optimizers of one model."""
    module = SmallModel(seed, torch.float64)
    matrices = [name for name, parameter in module.named_parameters() if parameter.dim() == 2]

    def make(module: torch.nn.Module) -> list[torch.optim.Optimizer]:
        named = [(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]
        return [
            torch.optim.Muon([parameter for name, parameter in named if name in matrices], lr=1e-2),
            torch.optim.AdamW([parameter for name, parameter in named if name not in matrices], lr=1e-3),
        ]

    plain = SmallModel(seed, torch.float64)
    expected = make(plain)
    # With two instances of two ranks each.
    options: dict[str, Any] = {}
    if world_size == 4:
        options["process_group"] = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
        options["instance_process_group"] = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = DistributedDataParallel(
        module, bucket_size=200, use_distributed_optimizer=True, overlap_param_gather=True, **options
    )
    optimizers = [DistributedOptimizer(one, model) for one in make(module)]
    for step in range(STEPS):
        batches = [batch_of(seed, step, other, 0, module) for other in range(world_size)]
        plain.zero_grad()
        (sum(plain(batch) for batch in batches) / world_size).backward()
        for one in expected:
            one.step()
        for one in optimizers:
            one.zero_grad()
        model(batches[rank]).backward()
        for one in optimizers:
            one.step()
    model.start_param_sync(force_sync=True)
    for (name, want), got in zip(plain.named_parameters(), module.parameters(), strict=True):
        # It orthogonalizes in bfloat16, where the last bits of a gradient matter.
        torch.testing.assert_close(got, want, rtol=5e-2, atol=2e-2, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.sample(1)
@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
@pytest.mark.parametrize("world_size", [2, 4])
def test_muon_and_adamw_share_a_model(world_size):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    run_ranks(_muon, world_size, BACKENDS[-1], timeout=120, seed=seed)


def _state_is_the_owners(rank: int, world_size: int) -> int:
    model = DistributedDataParallel(ManyShapes(4, torch.float32), bucket_size=1, use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(torch.optim.Adafactor(groups_of(model.module)), model)
    optimizer.zero_grad()
    model(batch_of(4, 0, rank, 0, model.module)).backward()
    optimizer.step()
    owned = [run.pieces[0].name for run in optimizer._runs]
    assert len(optimizer._inner.state) == len(owned)
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, owned)
    assert sorted(name for names in everyone for name in names) == sorted(model._trainable)
    return sum(run.tensor.numel() for run in optimizer._runs)


def test_each_parameter_has_its_state_on_one_rank():
    elements = run_ranks(_state_is_the_owners, 3, BACKENDS[-1], timeout=60)
    assert min(elements) > 0, elements


@only_on_cpu("no tensors")
def test_shares_of_ranks_are_balanced():
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(200):
        size = rng.randint(1, 8)
        shares = [
            {rank: rng.randint(1, 50) for rank in rng.sample(range(size), rng.randint(1, size))}
            for _ in range(rng.randint(0, 30))
        ]
        owners = owners_of(shares, size)
        load, at_home = [0] * size, [0] * size
        for owner, share in zip(owners, shares, strict=True):
            load[owner] += sum(share.values())
            if len(share) == 1:
                assert owner in share
                at_home[owner] += share[owner]
        # Nobody has more than the largest above the average, but for what lies on one rank anyway.
        largest = max((sum(share.values()) for share in shares), default=0)
        assert all(mine <= max(home, sum(load) / size + 2 * largest) for mine, home in zip(load, at_home, strict=True))
        # What two ranks have in equal parts goes to one of them.
        assert owners_of([{0: 5, size - 1: 5}], size) == [0]


def _scaled(rank: int, world_size: int, unscales: bool) -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    make: Make = lambda groups: torch.optim.Adafactor(groups, lr=1e-2)  # noqa: E731
    model = DistributedDataParallel(SmallModel(3, torch.float32), bucket_size=100, use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(make(groups_of(model.module)), model)
    oracle = Oracle(SmallModel(3, torch.float32), make, torch.float32)
    scaler = ShardedGradScaler(device=DEVICE, init_scale=1024.0, process_group=dist.group.WORLD)
    for step in range(10):
        batches = [[batch_of(3, step, other, 0, model.module)] for other in range(world_size)]
        overflows = step == 4
        if not overflows:
            oracle.step(batches, 0.5 if unscales else None, 2.0)
        optimizer.zero_grad()
        batch = batches[rank][0] * (1e30 if overflows and rank == 0 else 1.0)  # one rank alone sees it
        scaler.scale(model(batch)).backward()
        if unscales:
            scaler.unscale_(optimizer)
            if not overflows:
                optimizer.clip_grad_norm_(0.5)
        else:
            assert optimizer.grad_norm().item() >= 0 or overflows  # looking changes nothing
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == (1024.0 if step < 4 else 512.0)
    model.start_param_sync(force_sync=True)
    oracle.check(model.module, f"rank {rank}")


@pytest.mark.parametrize("unscales", [False, True])
def test_gradients_are_unscaled_and_a_step_that_overflows_is_skipped(unscales):
    run_ranks(_scaled, 2, BACKENDS[-1], timeout=60, unscales=unscales)


def _train(seed: int, steps: range, replicas: int, model: Any, optimizer: Any) -> None:
    """The same batches whatever the number of ranks: each rank takes its share of four."""
    for step in steps:
        optimizer.zero_grad()
        share = [batch_of(seed, step, other, 0, model.module) for other in range(dist.get_rank(), 4, replicas)]
        for index, batch in enumerate(share):
            with model.no_sync() if index < len(share) - 1 else contextlib.nullcontext():
                (model(batch) / len(share)).backward()
        optimizer.step()
    model.start_param_sync(force_sync=True)


def _saved_pair(seed: int, bucket_size: int | None) -> tuple[DistributedDataParallel, DistributedOptimizer, Oracle]:
    rng = random.Random(seed)
    return _make(seed, rng, rng.choice(OPTIMIZERS), rng.choice([torch.float64, torch.bfloat16]), bucket_size)


def _save(rank: int, world_size: int, seed: int, folder: str) -> None:
    model, optimizer, _ = _saved_pair(seed, 300)
    _train(seed, range(5), world_size, model, optimizer)
    dcp.save({"model": model.module.state_dict(), "optimizer": optimizer}, checkpoint_id=folder)


def _goes_on(seed: int, world_size: int, oracle: Oracle, model: Any, optimizer: Any) -> None:
    for step in range(10):
        oracle.step([[batch_of(seed, step, other, 0, oracle.module)] for other in range(4)], None, 2.0)
    _train(seed, range(5, 10), world_size, model, optimizer)
    oracle.check(model.module, f"seed {seed} of {world_size}")


def _load(rank: int, world_size: int, seed: int, folder: str, bucket_size: int | None) -> None:
    model, optimizer, oracle = _saved_pair(seed, bucket_size)
    dcp.load({"model": model.module.state_dict(), "optimizer": optimizer}, checkpoint_id=folder)
    _goes_on(seed, world_size, oracle, model, optimizer)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("before", "after"), [(2, 2), (1, 4), (4, 2)])
def test_training_goes_on_from_a_checkpoint_of_another_number_of_ranks(before, after, tmp_path: Path):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    run_ranks(_save, before, BACKENDS[-1], timeout=60, seed=seed, folder=str(tmp_path))
    for bucket_size in (1, None):
        run_ranks(_load, after, BACKENDS[-1], timeout=60, seed=seed, folder=str(tmp_path), bucket_size=bucket_size)


def _in_memory(rank: int, world_size: int, seeds: list[int]) -> None:
    uses: list[Callable[[DistributedOptimizer], Any]] = [
        lambda one: one.state_dict(),
        lambda one: one.full_state_dict(),
    ]
    for seed in seeds:
        for use in uses:
            model, optimizer, oracle = _saved_pair(seed, 300)
            _train(seed, range(5), world_size, model, optimizer)
            other, into, _ = _saved_pair(seed, 300)
            other.module.load_state_dict(model.module.state_dict())
            into.load_state_dict(use(optimizer))
            _goes_on(seed, world_size, oracle, other, into)


def test_state_is_loaded_in_memory():
    first = random.SystemRandom().randrange(10**6)
    print(f"seeds {first} to {first + 3}")
    run_ranks(_in_memory, 2, BACKENDS[-1], timeout=60, seeds=list(range(first, first + 4)))


def _stepped(rank: int, world_size: int) -> None:
    for make in OPTIMIZERS:
        module = SmallModel(11, torch.float64)
        oracle = Oracle(SmallModel(11, torch.float64), make, torch.float64)
        used = make(groups_of(module))
        batches = [[batch_of(11, step, 0, 0, module)] for step in range(6)]
        for batch in batches[:3]:
            oracle.step([batch], None, 2.0)
            used.zero_grad()
            module(batch[0]).backward()
            used.step()
        model = DistributedDataParallel(module, use_distributed_optimizer=True, bucket_size=300)
        optimizer = DistributedOptimizer(used, model, is_elementwise=False)
        for batch in batches[3:]:
            oracle.step([batch], None, 2.0)
            optimizer.zero_grad()
            model(batch[0]).backward()
            optimizer.step()
        oracle.check(model.module, f"rank {rank} {type(used).__name__}")


def test_an_optimizer_that_has_stepped_is_taken_over_with_its_state():
    run_ranks(_stepped, 2, BACKENDS[-1], timeout=60)


def _rated(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    model = DistributedDataParallel(torch.nn.Linear(8, 8, bias=False), use_distributed_optimizer=True)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.5)
    optimizer = DistributedOptimizer(inner, model, is_elementwise=False)
    lengths = []
    for step in range(4):
        before = model.module.weight.detach().clone()
        optimizer.zero_grad()
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        lengths.append((before - model.module.weight.detach()).max().item())
        scheduler.step()
        if step == 2:
            optimizer.param_groups[0]["lr"] = 2.0
    assert lengths == pytest.approx([1.0, 0.5, 0.25, 2.0], abs=1e-5)


def test_a_rate_that_is_set_on_either_optimizer_counts():
    run_ranks(_rated, 2, BACKENDS[0])
