"""farandole's data parallelism over CUDA tensors: the same training as in one process, by every overlap setting."""

import contextlib
import itertools
import random

import pytest
import torch
from torch import nn

from ddp.optimizer_oracle import OPTIMIZERS, Oracle, SmallModel, batch_of, draw, groups_of
from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from gpu.replicas import Alone, assert_close, batches, layers, loss_of
from support.gpus import needs_gpu, run_on_gpus

pytestmark = [needs_gpu, pytest.mark.timeout(200)]
STEPS = 20
# overlap_grad_reduce, overlap_param_gather, overlap_param_gather_with_optimizer_step
OVERLAPS = list(itertools.product((False, True), repeat=3))


def _adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2)


def _replica(seed, dtype, make, overlaps, device):
    overlap_grad_reduce, overlap_param_gather, in_parts = overlaps
    in_fp32 = dtype == torch.bfloat16
    model = DistributedDataParallel(
        SmallModel(seed, dtype).to(device),
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=in_fp32,
        bucket_size=1000,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather,
    )
    optimizer = DistributedOptimizer(
        make(groups_of(model.module)), model, overlap_param_gather_with_optimizer_step=in_parts
    )
    return model, optimizer, Oracle(SmallModel(seed, dtype).to(device), make, torch.float32 if in_fp32 else dtype)


def _train_by_every_overlap(rank, world_size, seed, dtype, device="cuda"):
    for number, overlaps in enumerate(OVERLAPS):
        rng = random.Random(seed + number)
        make, accumulate, max_norm = draw(rng, dtype), rng.randint(1, 2), rng.choice([None, 0.1, 10.0])
        model, optimizer, oracle = _replica(seed, dtype, make, overlaps, device)
        for step in range(STEPS):
            where = f"seed {seed}, {overlaps}, step {step}, rank {rank}"
            of_ranks = [
                [batch_of(seed, step, other, i, model.module).to(device) for i in range(accumulate)]
                for other in range(world_size)
            ]
            want = oracle.step(of_ranks, max_norm, 2.0)
            optimizer.zero_grad()
            for i, batch in enumerate(of_ranks[rank]):
                with model.no_sync() if i < accumulate - 1 else contextlib.nullcontext():
                    model(batch).backward()
            if max_norm is not None:
                got = optimizer.clip_grad_norm_(max_norm)
                assert got.item() == pytest.approx(want.item(), rel=oracle.tolerance), where
            optimizer.step()
        model.start_param_sync(force_sync=True)
        oracle.check(model.module, where)
        for parameter in model.module.parameters():
            if parameter.requires_grad:
                assert parameter.main_grad.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)
        for run in optimizer._runs:
            assert run.tensor.dtype == (torch.float32 if dtype == torch.bfloat16 else dtype)


@pytest.mark.parametrize("dtype", [torch.double, torch.bfloat16], ids=["double", "bfloat16"])
def test_every_overlap_setting_trains_as_the_plain_optimizer(world, dtype):
    """bfloat16 with gradients and copies of float32."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    run_on_gpus(_train_by_every_overlap, world, timeout=120, seed=seed, dtype=dtype)


def _accumulate(rank, world_size, device="cuda"):
    module = layers(device, torch.bfloat16)
    alone = Alone(module, _adam)
    for sharded, overlaps in itertools.product((False, True), repeat=2):
        model = DistributedDataParallel(
            layers(device, torch.bfloat16),
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=sharded,
            overlap_grad_reduce=overlaps,
            bucket_size=1000,
        )
        parameters = list(alone.module.parameters())
        for step in range(3):
            model.zero_grad_buffer()
            sums = [[torch.zeros_like(p, dtype=torch.float) for p in parameters] for _ in range(world_size)]
            for i in range(3):
                of_ranks = batches(10 * step + i, world_size, device, torch.bfloat16)
                for mine, batch in zip(sums, of_ranks, strict=True):
                    grads = torch.autograd.grad(loss_of(alone.module(batch)), parameters)
                    torch._foreach_add_(mine, [grad.float() for grad in grads])
                with model.no_sync() if i < 2 else contextlib.nullcontext():
                    loss_of(model(of_ranks[rank])).backward()
                if i < 2:  # this rank's own
                    for parameter, want in zip(model.parameters(), sums[rank], strict=True):
                        assert_close(parameter.main_grad, want, f"step {step}, backward {i}, rank {rank}", 2e-2)
            for bucket in model._reducer.buckets():
                part = bucket.grads.numel() // (world_size if sharded else 1)
                begin, end = (rank * part, (rank + 1) * part) if sharded else (0, part)
                for index, offset, numel in bucket.slots:
                    first, last = max(offset, begin), min(offset + numel, end)
                    want = sum(mine[index] for mine in sums).flatten() / world_size
                    if first < last:
                        where = f"step {step}, parameter {index}, rank {rank}"
                        assert_close(bucket.grads[first:last], want[first - offset : last - offset], where, 2e-2)


def test_gradients_of_several_backwards_add_up_in_main_grad(world):
    run_on_gpus(_accumulate, world)


def _scale(rank, world_size, device="cuda"):
    """An overflow in the last rank's batch: every rank skips the step."""
    kind = torch.device(device).type
    for overlaps in OVERLAPS:
        overlap_grad_reduce, overlap_param_gather, in_parts = overlaps
        model = DistributedDataParallel(
            layers(device, torch.float),
            use_distributed_optimizer=True,
            bucket_size=1000,
            overlap_grad_reduce=overlap_grad_reduce,
            overlap_param_gather=overlap_param_gather,
        )
        alone = Alone(model.module, _adam)
        optimizer = DistributedOptimizer(
            _adam(model.parameters()), model, overlap_param_gather_with_optimizer_step=in_parts
        )
        ours, theirs = (torch.amp.GradScaler(kind, init_scale=512.0, growth_interval=3) for _ in range(2))
        for step in range(8):
            of_ranks = batches(step, world_size, device, torch.float)
            if step == 4:
                of_ranks[-1][0, 0] = torch.inf
            optimizer.zero_grad()
            ours.scale(loss_of(model(of_ranks[rank]))).backward()
            ours.unscale_(optimizer)
            optimizer.clip_grad_norm_(0.5)
            ours.step(optimizer)
            ours.update()
            theirs.scale(torch.ones((), device=device))
            alone.backward(of_ranks, theirs.get_scale())
            theirs.unscale_(alone.optimizer)
            nn.utils.clip_grad_norm_(alone.module.parameters(), 0.5)
            theirs.step(alone.optimizer)
            theirs.update()
            assert ours.get_scale() == theirs.get_scale(), f"{overlaps}, step {step}, rank {rank}"
        model.start_param_sync(force_sync=True)
        alone.check(model.module, f"{overlaps}, rank {rank}", 2e-3)


def test_an_overflow_of_one_rank_skips_the_step_of_all(world):
    run_on_gpus(_scale, world)


def _state(rank, world_size, device="cuda"):
    for dtype, make in itertools.product((torch.double, torch.bfloat16), (OPTIMIZERS[0], OPTIMIZERS[1])):

        def replica(bucket_size, dtype=dtype, make=make):
            model = DistributedDataParallel(
                layers(device, dtype),
                use_distributed_optimizer=True,
                overlap_param_gather=True,
                bucket_size=bucket_size,
            )
            return model, DistributedOptimizer(make([{"params": list(model.parameters())}]), model)

        def train(model, optimizer, steps, dtype=dtype):
            for step in steps:
                optimizer.zero_grad()
                loss_of(model(batches(step, world_size, device, dtype)[rank])).backward()
                optimizer.step()
            model.start_param_sync(force_sync=True)
            return [parameter.detach().clone() for parameter in model.parameters()]

        first, optimizer = replica(1000)
        train(first, optimizer, range(3))
        saved, whole, module = optimizer.state_dict(), optimizer.full_state_dict(), first.module.state_dict()
        assert all(value.device.type == "cpu" for values in whole["state"].values() for value in values.values())
        module = {name: value.clone() for name, value in module.items()}
        saved = {"state": {n: dict(v) for n, v in saved["state"].items()}, "param_groups": saved["param_groups"]}
        others = []
        for state, bucket_size in ((saved, 1000), (whole, 3000)):
            other, loaded = replica(bucket_size)
            other.module.load_state_dict(module)
            loaded.load_state_dict(state)
            others.append((other, loaded))
        want = train(first, optimizer, range(3, 6))
        for other, loaded in others:
            for index, (got, expected) in enumerate(zip(train(other, loaded, range(3, 6)), want, strict=True)):
                tolerance = 1e-9 if dtype == torch.double else 1e-2
                assert_close(got, expected, f"{dtype}, parameter {index}, rank {rank}", tolerance)


def test_state_in_memory_goes_on_where_it_was_saved(world):
    run_on_gpus(_state, world)
