"""farandole.megatron.DistributedDataParallel against Megatron-core's own: layouts and gradients."""

from __future__ import annotations

import contextlib
import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from farandole import megatron
from megatron_api import data_parallel_support as support
from megatron_api.megatron_support import world
from support.devices import only_on_cpu, seeded
from support.megatrons import cases, check_version, environment_of, every_megatron, import_distributed
from support.processes import await_all, run_ranks


def _their_layout(model: Any) -> list[tuple[Any, ...]]:
    rows = []
    for parameter in model.params_with_grad:
        bucket = model.param_to_bucket_group[parameter].param_to_bucket[parameter]
        rows.append((parameter.main_grad.storage_offset(), bucket.offset, bucket.offset + bucket.grad_data.numel()))
    return rows


def _our_layout(model: Any) -> list[tuple[Any, ...]]:
    rows = {}
    for bucket in model._reducer.buckets():
        begin = bucket.grads.storage_offset()
        for parameter, offset, _ in bucket.slots:
            rows[parameter] = (begin + offset, begin, begin + bucket.grads.numel())
    assert [rows[i][0] for i in range(len(rows))] == [p.main_grad.storage_offset() for p in model.params_with_grad]
    return [rows[i] for i in range(len(rows))]


def _layouts(rank: int, world_size: int, version: str, cases: int, seed: int) -> None:
    rng = random.Random(seed)
    import_distributed()
    check_version(version)
    alone = support.alone_groups(rank, world_size)
    for case in range(cases):
        module = support.Weights(rng)
        options = {
            "overlap_grad_reduce": rng.random() < 0.8,
            "grad_reduce_in_fp32": rng.random() < 0.3,
            "use_distributed_optimizer": rng.random() < 0.5,
            "bucket_size": rng.choice([None, 1, 64, 300, 5000]),
            "pad_buckets_for_high_nccl_busbw": rng.random() < 0.2,
        }
        collection = support.collection_of(world(), rng.choice([alone, world()]), rng.choice([0, 0, 1]))
        disable = rng.random() < 0.1
        theirs, ours = support.both(module, options, collection, disable_bucketing=disable)
        context = f"seed {seed}, case {case}: {options} {disable}"
        assert _our_layout(ours) == _their_layout(theirs), context
        assert ours.bucket_size == theirs.bucket_size, context
    await_all(rank, world_size)


@pytest.mark.sample(3)
@every_megatron
@pytest.mark.parametrize("size", [1, 2, 3])
def test_offsets_and_buckets_are_megatrons(version, size):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    given = dict(version=version, cases=cases(70), seed=seed)
    run_ranks(_layouts, size, "gloo", timeout=120, env=environment_of(version), **given)


def _step(model: Any, batches: list[torch.Tensor], explicit: bool, force: bool) -> None:
    model.zero_grad_buffer()
    for i, batch in enumerate(batches):
        last = i == len(batches) - 1
        with contextlib.nullcontext() if last and not explicit else model.no_sync():
            model(batch).backward()
    if explicit:
        model.start_grad_sync()
    model.finish_grad_sync(force_all_reduce=force)


def _train(rank: int, world_size: int, version: str, cases: int, seed: int) -> None:
    rng = random.Random(seed)
    import_distributed()
    check_version(version)
    from megatron.core.distributed import param_and_grad_buffer

    reduce_scatter = param_and_grad_buffer.dist_reduce_scatter_func
    alone = support.alone_groups(rank, world_size)
    for case in range(cases):
        # One model that accumulates in float32 replaces it for all that come after.
        param_and_grad_buffer.dist_reduce_scatter_func = reduce_scatter
        dtype = rng.choice([torch.float32, torch.float64, torch.bfloat16])
        per_token = rng.random() < 0.3
        overlap, sharded = rng.random() < 0.6, rng.random() < 0.5
        options = {
            "overlap_grad_reduce": overlap,
            "grad_reduce_in_fp32": rng.random() < 0.4,
            "use_distributed_optimizer": sharded,
            "bucket_size": rng.choice([None, 1, 50]),
            "average_in_collective": not per_token and rng.random() < 0.3,
        }
        # Megatron-core makes float32 of float64 there.
        in_float = sharded and dtype != torch.float64 and not options["average_in_collective"] and rng.random() < 0.4
        options["reduce_scatter_with_fp32_accumulation"] = in_float
        collection = support.collection_of(world(), rng.choice([alone, world()]))
        context = f"seed {seed}, case {case}: {dtype} {per_token} {options}"
        theirs, ours = support.both(support.Network(rng, dtype), options, collection, per_token)
        for step in range(3):
            count = rng.randint(1, 3)
            # Megatron-core's first step must find out how many gradients there are, and reduces at its end.
            explicit = overlap and rng.random() < 0.3
            force = sharded and not overlap and rng.random() < 0.3
            generator = seeded(rng.randrange(2**31) + rank)
            batches = [torch.randn(3, 4, generator=generator).to(dtype) for _ in range(count)]
            for model in (theirs, ours):
                _step(model, batches, explicit, force)
            for other, mine in support.parts(theirs, ours, sharded and not force):
                assert other.dtype == mine.dtype, context
                assert torch.equal(other, mine), f"{context}, step {step}: {other.flatten()[:5]} {mine.flatten()[:5]}"
            factor = torch.tensor(1.0) / 3
            for model in (theirs, ours):
                model.scale_gradients(factor)
            for other, mine in support.parts(theirs, ours, sharded):
                assert torch.equal(other, mine), context
            assert all(p.grad is None and p.grad_added_to_main_grad is False for p in ours.params_with_grad)
    await_all(rank, world_size)


@every_megatron
def test_gradients_of_steps_are_megatrons_bit_for_bit(version):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    given = dict(version=version, cases=cases(60), seed=seed)
    run_ranks(_train, 2, "gloo", timeout=120, env=environment_of(version), **given)


def _again(rank: int, world_size: int, version: str, cases: int, seed: int) -> None:
    rng = random.Random(seed)
    import_distributed()
    check_version(version)
    for case in range(cases):
        # With overlap Megatron-core's reduces a bucket at its first gradient where nothing was reset.
        options = {"overlap_grad_reduce": False, "bucket_size": rng.choice([None, 1, 50])}
        per_token = rng.random() < 0.5
        context = f"seed {seed}, case {case}: {per_token} {options}"
        module = support.Network(rng, torch.float64)
        for parameter in module.parameters():
            parameter.allreduce = True
        theirs, ours = support.both(module, options, support.collection_of(world(), None), per_token)
        plain = copy.deepcopy(module)
        total: list[torch.Tensor] = []
        for step in range(3):
            batch = torch.randn(3, 4, generator=seeded(rng.randrange(2**31) + rank), dtype=torch.float64)
            theirs(batch).backward()
            theirs.finish_grad_sync()
            if not per_token or step == 0:
                ours(batch).backward()
                ours.finish_grad_sync()
                for other, mine in support.parts(theirs, ours, False):
                    assert torch.equal(other, mine), (context, step)
                total = [parameter.main_grad.clone() for parameter in theirs.params_with_grad]
                continue
            ours(batch).backward()
            with pytest.raises(RuntimeError, match=r"parameter .* would be summed over the ranks once more"):
                ours.finish_grad_sync()
            # Theirs has what was summed in the step before once more for each rank.
            plain(batch).backward()
            for other, own, before in zip(theirs.params_with_grad, plain.parameters(), total, strict=True):
                dist.all_reduce(own.grad)
                torch.testing.assert_close(other.main_grad, own.grad + world_size * before)
            break
    await_all(rank, world_size)


@every_megatron
def test_steps_without_a_reset_add_up_as_megatrons_where_that_is_right(version):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    run_ranks(_again, 2, "gloo", 120, environment_of(version), version=version, cases=cases(20), seed=seed)


def _surroundings(rank: int, world_size: int) -> None:
    torch.manual_seed(rank)
    config, ddp_config = megatron.ModelParallelConfig(), megatron.DistributedDataParallelConfig()
    collection = support.collection_of(world(), None)
    module = torch.nn.Linear(3, 2)
    before = module.weight.detach().clone()
    model = megatron.DistributedDataParallel(config, ddp_config, module, pg_collection=collection)
    assert torch.equal(module.weight, before)  # construction gives nothing away
    model.broadcast_params()
    weights = [torch.zeros_like(before) for _ in range(world_size)]
    dist.all_gather(weights, module.weight.detach())
    assert torch.equal(weights[0], weights[1])
    assert list(model.state_dict()) == ["weight", "bias"]
    model.load_state_dict({"weight": before, "bias": torch.zeros(2)})
    assert torch.equal(module.weight, before)

    # A kernel that has added to main_grad itself.
    module = torch.nn.Linear(3, 2)
    module.weight.grad_added_to_main_grad = True
    fused = megatron.DistributedDataParallel(config, ddp_config, module, pg_collection=collection)
    fused.zero_grad_buffer()
    module.weight.main_grad.fill_(rank)
    module.weight.grad_added_to_main_grad = True
    fused(torch.ones(1, 3)).sum().backward()
    fused.finish_grad_sync()
    assert module.weight.main_grad.unique().tolist() == [0.5] and module.bias.main_grad.unique().tolist() == [1.0]
    fused.zero_grad_buffer()
    assert module.weight.grad_added_to_main_grad is False
    module.weight.grad_added_to_main_grad = module.weight.zero_out_wgrad = True
    fused(torch.ones(1, 3)).sum().backward()
    fused.finish_grad_sync()
    assert module.weight.main_grad.unique().tolist() == [1.0]
    await_all(rank, world_size)


def test_parameters_are_broadcast_when_asked_and_fused_kernels_are_known():
    run_ranks(_surroundings, 2, "gloo")


def _unlike(rank: int, world_size: int) -> None:
    config, ddp_config = megatron.ModelParallelConfig(), megatron.DistributedDataParallelConfig()
    collection = support.collection_of(world(), None)
    with pytest.raises(ValueError, match="weight"):
        megatron.DistributedDataParallel(config, ddp_config, torch.nn.Linear(3, 2 + rank), pg_collection=collection)
    await_all(rank, world_size)


def test_other_models_are_an_error_on_every_rank():
    run_ranks(_unlike, 2, "gloo")


def _torchs(rank: int, world_size: int) -> None:
    config, ddp_config = megatron.ModelParallelConfig(), megatron.DistributedDataParallelConfig()
    collection = support.collection_of(world(), None)
    model = megatron.DistributedDataParallel(config, ddp_config, torch.nn.Linear(3, 2), pg_collection=collection)
    with pytest.raises(RuntimeError, match="copying or pickling"):
        copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=r"join\(\): expected gradients that are reduced when backward ends"):
        model.join()


def test_what_only_torchs_wrapper_does_is_refused_by_name():
    run_ranks(_torchs, 1, "gloo")


@only_on_cpu("no tensors")
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_megatron_fsdp", True), ("nccl_ub", True), ("fp8_param_gather", True), ("delay_wgrad_compute", True),
        ("data_parallel_sharding_strategy", "optim"), ("check_for_large_grads", True),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(name, value):
    with pytest.raises(NotImplementedError, match=name):
        megatron.DistributedDataParallelConfig(**{name: value})


@only_on_cpu("no tensors")
@pytest.mark.parametrize(
    "options",
    [
        {"overlap_param_gather": True},
        {"num_distributed_optimizer_instances": 2},
        {"num_buckets": 0},
        {"reduce_scatter_with_fp32_accumulation": True},
    ],
)
def test_values_that_do_not_fit_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        megatron.DistributedDataParallelConfig(**options)


def _defaults(rank: int, world_size: int, version: str) -> None:
    theirs = import_distributed().DistributedDataParallelConfig()
    check_version(version)
    ours = megatron.DistributedDataParallelConfig()
    assert {name: getattr(ours, name) for name in vars(theirs)} == vars(theirs)


@only_on_cpu("no tensors")
@every_megatron
def test_defaults_are_megatrons(version):
    run_ranks(_defaults, 1, None, env=environment_of(version), version=version)


def _scale_by_infinity(rank: int, world_size: int) -> None:
    config = megatron.ModelParallelConfig()
    ddp_config = megatron.DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    collection = support.collection_of(world(), None)
    model = megatron.DistributedDataParallel(config, ddp_config, torch.nn.Linear(3, 2), pg_collection=collection)
    for parameter in model.parameters():
        parameter.main_grad.fill_(1.0)
    model.scale_gradients(torch.tensor(torch.inf))
    for bucket in model._reducer.buckets():
        assert bucket.grads.isinf().sum() == 8 and not bucket.grads.isnan().any()


def test_infinity_does_not_spoil_what_pads_gradients():
    run_ranks(_scale_by_infinity, 2, "gloo", timeout=60)
