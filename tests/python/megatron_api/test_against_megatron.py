"""The same calls of farandole.megatron and of Megatron-core: results, gradients, and what user functions see when."""

from __future__ import annotations

import random
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from farandole import megatron, pipelining
from megatron_api import megatron_support as support
from support.devices import only_on_cpu
from support.megatrons import cases, check_version, environment_of, every_megatron, import_schedules
from support.processes import await_all, run_ranks


def _config(options: dict[str, Any], virtual: int | None, recorder: support.Recorder) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    size, chunks = options["size"], virtual or 1
    config = TransformerConfig(
        num_layers=size * chunks,
        hidden_size=support.HIDDEN,
        num_attention_heads=2,
        calculate_per_token_loss=options["per_token"],
        tensor_model_parallel_size=options["tp"],
        context_parallel_size=options["cp"],
        sequence_parallel=options["sequence_parallel"] and options["tp"] > 1,
        pipeline_model_parallel_size=size,
        virtual_pipeline_model_parallel_size=virtual,
        pipeline_dtype=torch.double,
        batch_p2p_sync=False,
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, also without experts
        deallocate_pipeline_outputs=options["deallocate"],
        variable_seq_lengths=options["variable"],
        num_microbatches_with_partial_activation_checkpoints=options["checkpoints"],
        timers=recorder.timers if options["timers"] else None,
        grad_scale_func=(lambda loss: loss * 8) if options["scaled"] else None,
        no_sync_func=recorder.no_sync if options["no_sync"] else None,
        finalize_model_grads_func=recorder.finalize if options["finalize"] else None,
        microbatch_group_size_per_vp_stage=options["group"],
    )
    config.model_type = "encoder_or_decoder"
    if options["grad_sync"]:
        config.grad_sync_func = recorder.grad_sync
    if options["param_sync"] and virtual is not None:
        config.param_sync_func = [partial(recorder.param_sync, chunk) for chunk in range(chunks)]
    return config


def _options(rng: random.Random, size: int, virtual: int | None) -> dict[str, Any]:
    count = rng.randint(1, 9) if virtual is None else size * rng.randint(1, 3)
    forward_only = rng.random() < 0.25
    return {
        "size": size,
        "count": count,
        "group": size if virtual is None or rng.random() < 0.5 else rng.choice([size, count]),
        "kind": rng.choice(["mean", "tokens"]),
        "forward_only": forward_only,
        "collect": forward_only and rng.random() < 0.3,
        "per_token": rng.random() < 0.4,
        "deallocate": rng.random() < 0.5,
        "variable": rng.random() < 0.3,
        "checkpoints": rng.randint(0, 2) if size > 1 and rng.random() < 0.3 else None,
        "timers": rng.random() < 0.5,
        "scaled": rng.random() < 0.4,
        "no_sync": rng.random() < 0.7,
        "finalize": rng.random() < 0.6,
        "grad_sync": rng.random() < 0.4,
        "param_sync": rng.random() < 0.4,
        "first_val_step": rng.choice([None, True, False]),
        "force": rng.random() < 0.3,
        "cp": rng.choice([1, 1, 2]),
        "tp": rng.choice([1, 2]),
        "sequence_parallel": rng.random() < 0.5,
        "seed": rng.randrange(1000),
    }


def _run(theirs: bool, rank: int, options: dict[str, Any], virtual: int | None, own_exchange: bool) -> Any:
    size, chunks = options["size"], virtual or 1
    recorder = support.Recorder()
    config = _config(options, virtual, recorder)
    models = [support.Chunk(config, c * size + rank, size * chunks, recorder.log) for c in range(chunks)]
    length = support.SEQUENCE // options["cp"] // (options["tp"] if config.sequence_parallel else 1)
    iterators = [support.batches(options["seed"], options["count"], length, options["variable"]) for _ in models]
    schedules = import_schedules()
    if theirs and not own_exchange:
        from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    else:
        P2PCommunicator = megatron.P2PCommunicator  # noqa: N806
    module = schedules if theirs else megatron
    groups = support.collection_of(options["tp"], options["cp"])
    if theirs:  # 0.19 takes no stand-in
        from megatron.core.process_groups_config import ProcessGroupCollection

        groups = ProcessGroupCollection(**vars(groups))
    if size == 1:
        name = "forward_backward_no_pipelining"
    else:
        name = f"forward_backward_pipelining_with{'out' if virtual is None else ''}_interleaving"
    result = getattr(module, name)(
        forward_step_func=partial(support.forward_step, options["kind"], recorder.log),
        data_iterator=iterators if virtual is not None else iterators[0],
        model=models if virtual is not None else models[0],
        num_microbatches=options["count"],
        seq_length=support.SEQUENCE,
        micro_batch_size=support.BATCH,
        forward_only=options["forward_only"],
        collect_non_loss_data=options["collect"],
        first_val_step=options["first_val_step"],
        p2p_communicator=P2PCommunicator(support.world(), config) if size > 1 else None,
        pg_collection=groups,
        force_all_reduce=options["force"],
    )
    order = [entry for entry in recorder.log if not (entry[0] in ("start", "stop") and _is_exchange(entry[1]))]
    if options["forward_only"]:  # Megatron-core's never leaves no_sync_func there
        order = [entry for entry in order if entry not in ("sync", "no sync")]
    return result, support.gradients(models), order


def _is_exchange(timer: str) -> bool:
    return timer.endswith(("-recv", "-send"))


def _compare(rank: int, world_size: int, version: str, cases: int, seed: int, virtuals: list[int | None]) -> None:
    rng = random.Random(seed)
    import_schedules()
    check_version(version)
    for done in range(cases):
        virtual = rng.choice(virtuals)
        options = _options(rng, world_size, virtual)
        # Megatron-core's own exchanges mix activations and gradients up where both neighbours are one rank, and wait
        # for each other where shapes come with the tensors and one rank is all warm-up.
        own_exchange = virtual is not None and (world_size == 2 or options["variable"])
        context = f"seed {seed}, case {done}: {virtual} {options}"
        theirs = _run(True, rank, options, virtual, own_exchange)
        ours = _run(False, rank, options, virtual, own_exchange)
        for name, mine, other in zip(("result", "gradients", "order"), ours, theirs, strict=True):
            support.assert_equal(mine, other, (name, context))
    await_all(rank, world_size)


@pytest.mark.sample(3)
@every_megatron
@pytest.mark.parametrize("backend", ["gloo", "farandole"])
@pytest.mark.parametrize(("size", "virtuals"), [(1, [None]), (2, [None, 2, 3]), (4, [None, 2])])
def test_results_gradients_and_order_are_megatrons(version, backend, size, virtuals):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    env = environment_of(version)
    given = dict(version=version, cases=cases(30), seed=seed, virtuals=virtuals)
    run_ranks(_compare, size, backend, timeout=120, env=env, **given)


def _orders(rank: int, world_size: int, version: str, seed: int) -> None:
    schedules = import_schedules()
    check_version(version)
    rng = random.Random(seed)
    for _ in range(300):
        size, chunks = rng.choice([2, 3, 4, 8]), rng.randint(2, 4)
        group = size * rng.randint(1, 2)
        count = group * rng.randint(1, 4)
        plan = pipelining.plan("Interleaved1F1B", size * chunks, count, num_ranks=size, microbatch_group=group)
        table = schedules.get_schedule_table(count, chunks, group)
        for rank in range(size):
            one = SimpleNamespace(rank=lambda rank=rank: rank, size=lambda size=size: size)
            communicator = SimpleNamespace(pp_group=one, virtual_pipeline_model_parallel_size=chunks)
            total, _, warmup, rest = schedules.get_pp_rank_microbatches(
                count, chunks, group, p2p_communicator=communicator
            )
            forwards = [f"{chunk * size + rank}F{microbatch}" for microbatch, chunk in table]
            backwards = [f"{(chunks - 1 - chunk) * size + rank}B{microbatch}" for microbatch, chunk in table]
            expected = forwards[:warmup]
            for k in range(rest):
                expected += [forwards[warmup + k], backwards[k]]
            expected += backwards[rest:total]
            assert plan.actions[rank] == expected, (size, chunks, group, count, rank)


@only_on_cpu("no tensors")
@every_megatron
def test_the_interleaved_order_is_that_of_megatrons_tables(version):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    run_ranks(_orders, 1, None, env=environment_of(version), version=version, seed=seed)


@only_on_cpu("no tensors")
def test_steady_1f1b_sends_and_receives_at_once_as_megatron_does():
    actions = pipelining.lower(pipelining.plan("1F1B", 4, 6), "one_queue_per_rank").actions[1]
    assert "(1SEND_F3;1RECV_B1)BATCH_P2P" in actions  # send_forward_recv_backward
    assert "(1RECV_F4;1SEND_B1)BATCH_P2P" in actions  # send_backward_recv_forward
