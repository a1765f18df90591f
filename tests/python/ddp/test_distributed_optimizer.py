"""Training with DistributedOptimizer equals training with the plain optimizer, in one process, on random models."""

from __future__ import annotations

import contextlib
import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS, fewer
from optimizer_oracle import OPTIMIZERS, Oracle, SmallModel, batch_of, draw, groups_of

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import DEVICE
from support.processes import run_ranks

STEPS = fewer(50)


def _pair(
    seed: int, dtype: torch.dtype | None = None, **options: Any
) -> tuple[random.Random, DistributedDataParallel, DistributedOptimizer, Oracle]:
    rng = random.Random(seed)
    drawn = rng.choice([torch.float64, torch.float32, torch.bfloat16])
    in_fp32 = dtype is None and (drawn == torch.bfloat16 or (rng.random() < 0.3 and drawn == torch.float32))
    dtype = dtype or drawn
    make = draw(rng, dtype)
    settings = {
        "bucket_size": rng.choice([1, 300, 2000, None]),
        "overlap_grad_reduce": rng.random() < 0.5,
        "overlap_param_gather": rng.random() < 0.5,
        "overlap_param_gather_with_optimizer_step": rng.random() < 0.5,
    } | options
    in_parts = settings.pop("overlap_param_gather_with_optimizer_step")
    model = DistributedDataParallel(
        SmallModel(seed, dtype), use_distributed_optimizer=True, grad_reduce_in_fp32=in_fp32, **settings
    )
    optimizer = DistributedOptimizer(
        make(groups_of(model.module)), model, overlap_param_gather_with_optimizer_step=in_parts
    )
    oracle = Oracle(SmallModel(seed, dtype), make, torch.float32 if in_fp32 else dtype)
    return rng, model, optimizer, oracle


def _trains_alike(rank: int, world_size: int, seeds: list[int], cases: list[dict[str, Any]] | None = None) -> None:
    for seed, case in itertools.product(seeds, cases or [{}]):
        rng, model, optimizer, oracle = _pair(seed, **case)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.98) for one in (optimizer, oracle.optimizer)]
        accumulate, max_norm = rng.randint(1, 4), rng.choice([None, 0.1, 10.0])
        norm_type = rng.choice([2.0, 1.0, torch.inf])
        for step in range(STEPS):
            where = f"seed {seed} {case} step {step} rank {rank}"
            batches = [
                [batch_of(seed, step, other, i, model.module) for i in range(accumulate)] for other in range(world_size)
            ]
            want = oracle.step(batches, max_norm, norm_type)
            optimizer.zero_grad() if rng.random() < 0.8 else optimizer.zero_grad(set_to_none=False)
            for i, batch in enumerate(batches[rank]):
                with model.no_sync() if i < accumulate - 1 else contextlib.nullcontext():
                    model(batch).backward()
            if max_norm is not None:
                got = optimizer.clip_grad_norm_(max_norm, norm_type)
                assert got.item() == pytest.approx(want.item(), rel=oracle.tolerance), where
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
    seeds = list(range(first, first + (4 if world_size <= 2 else 2)))  # ranks beyond the cores take turns
    print(f"seeds {seeds[0]} to {seeds[-1]}")
    run_ranks(_trains_alike, world_size, backend, timeout=150, seeds=seeds)


@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_overlap_setting_trains_as_the_plain_optimizer(backend):
    """Gradients of bfloat16, too, which the optimizer gets in float32: of two ranks they are the same bits."""
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    cases = [
        {
            "overlap_grad_reduce": overlap_grads,
            "overlap_param_gather": overlap_parameters,
            "overlap_param_gather_with_optimizer_step": in_parts,
            "disable_bucketing": is_whole,
            "bucket_size": 100,
            "dtype": torch.bfloat16
            if (overlap_grads + overlap_parameters + in_parts + is_whole + seed) % 2
            else torch.float64,
        }
        for overlap_grads, overlap_parameters, in_parts, is_whole in itertools.product((False, True), repeat=4)
    ]
    run_ranks(_trains_alike, 2, backend, timeout=300, seeds=[seed], cases=cases)


def _instances(rank: int, world_size: int, seeds: list[int]) -> None:
    """Two instances of two ranks: gradients are reduced within, then across."""
    within = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    for seed in seeds:
        _, model, optimizer, oracle = _pair(seed, process_group=within, instance_process_group=across)
        for step in range(10):
            batches = [[batch_of(seed, step, other, 0, model.module)] for other in range(world_size)]
            want = oracle.step(batches, 1.0, 2.0)
            optimizer.zero_grad()
            model(batches[rank][0]).backward()
            assert optimizer.clip_grad_norm_(1.0).item() == pytest.approx(want.item(), rel=oracle.tolerance)
            optimizer.step()
        model.start_param_sync(force_sync=True)
        oracle.check(model.module, f"seed {seed} rank {rank}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_several_optimizer_instances_train_as_one(backend):
    first = random.SystemRandom().randrange(10**6)
    print(f"seeds from {first}")
    run_ranks(_instances, 4, backend, timeout=120, seeds=list(range(first, first + fewer(6))))


def _unsharded(rank: int, world_size: int) -> None:
    """grad_reduce_in_fp32 without sharding: float32 copies on every rank, whole parameters, any optimizer."""
    for make in (OPTIMIZERS[0], lambda groups: torch.optim.Adafactor(groups, lr=1e-2)):
        model = DistributedDataParallel(SmallModel(7, torch.bfloat16), grad_reduce_in_fp32=True)
        optimizer = DistributedOptimizer(make(groups_of(model.module)), model)
        oracle = Oracle(SmallModel(7, torch.bfloat16), make, torch.float32)
        for step in range(STEPS):
            batches = [[batch_of(7, step, other, 0, model.module)] for other in range(world_size)]
            want = oracle.step(batches, 0.5, 2.0)
            optimizer.zero_grad()
            model(batches[rank][0]).backward()
            assert optimizer.clip_grad_norm_(0.5).item() == pytest.approx(want.item(), rel=oracle.tolerance)
            optimizer.step()
        oracle.check(model.module, f"rank {rank}")


def test_without_shards_any_optimizer_updates_float32_copies():
    run_ranks(_unsharded, 2, BACKENDS[-1], timeout=60)


def _stepped(rank: int, world_size: int) -> None:
    """An optimizer that has stepped by itself is taken over with its state."""
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
        optimizer = DistributedOptimizer(used, model)
        for batch in batches[3:]:
            oracle.step([batch], None, 2.0)
            optimizer.zero_grad()
            model(batch[0]).backward()
            optimizer.step()
        oracle.check(model.module, f"rank {rank} {type(used).__name__}")


def test_an_optimizer_that_has_stepped_is_taken_over_with_its_state():
    run_ranks(_stepped, 2, BACKENDS[-1], timeout=60)


def _scaled(rank: int, world_size: int) -> None:
    from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

    model = DistributedDataParallel(
        SmallModel(3, torch.float32), use_distributed_optimizer=True, overlap_param_gather=True
    )
    optimizer = DistributedOptimizer(torch.optim.AdamW(groups_of(model.module), lr=1e-2), model)
    oracle = Oracle(SmallModel(3, torch.float32), lambda groups: torch.optim.AdamW(groups, lr=1e-2), torch.float32)
    scaler = ShardedGradScaler(device=DEVICE, init_scale=1024.0, process_group=dist.group.WORLD)
    scales = []
    for step in range(10):
        batches = [[batch_of(3, step, other, 0, model.module)] for other in range(world_size)]
        overflows = step == 4
        if not overflows:
            oracle.step(batches, 0.5, 2.0)
        optimizer.zero_grad()
        batch = batches[rank][0] * (1e30 if overflows and rank == 0 else 1.0)  # one rank alone sees it
        scaler.scale(model(batch)).backward()
        scaler.unscale_(optimizer)
        if not overflows:
            optimizer.clip_grad_norm_(0.5)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [1024.0] * 4 + [512.0] * 6
    model.start_param_sync(force_sync=True)
    oracle.check(model.module, f"rank {rank}")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(backend):
    run_ranks(_scaled, 2, backend, timeout=60)


def _memory(rank: int, world_size: int) -> None:
    """Megatron's formulas, of a bfloat16 model with Adam: 6 + 12 / d with float32 gradients, 4 + 16 / d with short ones."""
    for in_fp32, bytes_per_element in ((True, 6 + 12 / world_size), (False, 4 + 16 / world_size)):
        module = torch.nn.Sequential(*[torch.nn.Linear(512, 512, dtype=torch.bfloat16) for _ in range(4)])
        elements = sum(parameter.numel() for parameter in module.parameters())
        model = DistributedDataParallel(module, use_distributed_optimizer=True, grad_reduce_in_fp32=in_fp32)
        optimizer = DistributedOptimizer(torch.optim.Adam(model.parameters()), model)
        optimizer.zero_grad()
        model(torch.randn(4, 512, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        model(torch.randn(4, 512, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.grad_norm()  # the optimizer has its gradients
        storages = {}
        tensors = [*model.parameters(), *(parameter.main_grad for parameter in model.parameters())]
        for run in optimizer._runs:
            tensors += [run.tensor, run.tensor.grad]
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if value.dim() > 0]
        for tensor in tensors:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        assert sum(storages.values()) == pytest.approx(bytes_per_element * elements, rel=0.03)


def test_memory_is_what_the_formulas_say():
    run_ranks(_memory, 2, BACKENDS[-1], timeout=60)


def _refusals(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(SmallModel(1, torch.float32), use_distributed_optimizer=True)
    parameters = list(model.parameters())
    with pytest.raises(
        ValueError, match=r"optimizer is a LBFGS, whose step\(\) needs a closure, .*: expected it without a Dist"
    ):
        DistributedOptimizer(torch.optim.LBFGS(parameters), model)
    plain = DistributedDataParallel(SmallModel(1, torch.float32))
    with pytest.raises(ValueError, match="expected all with use_distributed_optimizer=True, or none"):
        DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), [model, plain])

    class Custom(torch.optim.SGD):
        pass

    with pytest.raises(ValueError, match=r"optimizer is a Custom of .*: expected is_elementwise=True"):
        DistributedOptimizer(Custom(parameters, lr=0.1), model)
    another = type("Adam", (torch.optim.Adam,), {"__module__": "elsewhere"})  # with the name of torch's
    with pytest.raises(ValueError, match=r"optimizer is a Adam of elsewhere: expected is_elementwise=True"):
        DistributedOptimizer(another(parameters, lr=0.1), model)
    DistributedOptimizer(another(parameters, lr=0.1), model, is_elementwise=True)
    for one in (model, plain):
        with pytest.raises(ValueError, match="optimizer is a SparseAdam, which takes sparse gradients alone"):
            DistributedOptimizer(torch.optim.SparseAdam(list(one.parameters()), lr=0.1), one)
    DistributedOptimizer(Custom(parameters, lr=0.1), model, is_elementwise=True)
    with pytest.raises(ValueError, match=r"a parameter of shape \(3,\) in param group 1 that is none of the model's"):
        groups = [{"params": parameters}, {"params": [torch.nn.Parameter(torch.zeros(3))]}]
        DistributedOptimizer(torch.optim.SGD(groups, lr=0.1), model)
    with pytest.raises(TypeError, match=r"model has a Linear: expected farandole\.ddp"):
        DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), torch.nn.Linear(1, 1))
    with pytest.raises(TypeError, match=r"optimizer is a list: expected a torch\.optim\.Optimizer"):
        DistributedOptimizer([], model)
    optimizer = DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), model)
    with pytest.raises(NotImplementedError, match=r"add_param_group\(\): expected all param groups in the optimizer"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})
    for use in (optimizer.step, optimizer.grad_norm, lambda: optimizer.clip_grad_norm_(1.0)):
        with pytest.raises(RuntimeError, match="gradients were not reduced"):
            use()
    batch = batch_of(1, 0, rank, 0, model.module)
    model(batch).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=r"the gradients of the step before are still there.*zero_grad\(\)"):
        model(batch).backward()
    optimizer.zero_grad()
    with model.no_sync():
        model(batch).backward()
    with pytest.raises(RuntimeError, match="gradients were not reduced"):
        optimizer.step()
    with pytest.raises(ValueError, match="overlap_param_gather=True: expected use_distributed_optimizer=True"):
        DistributedDataParallel(SmallModel(1, torch.float32), overlap_param_gather=True)


def test_what_cannot_be_done_is_refused_by_name():
    run_ranks(_refusals, 2, "gloo", timeout=60)
