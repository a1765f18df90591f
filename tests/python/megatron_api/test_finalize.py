"""Whole steps: our schedules drive our data parallelism, and finalize_model_grads makes the gradients whole."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole import megatron
from farandole.ddp import DistributedOptimizer
from farandole.megatron import parallel_state
from megatron_api import megatron_support as support
from support.devices import ON_CPU, only_on_cpu
from support.megatrons import cases
from support.processes import await_all, run_ranks

COUNT = 4


class _TiedChunk(support.Chunk):
    """With a weight that the first and the last chunk share, or those that are named."""

    def __init__(self, config: Any, stage: int, num_stages: int, sharing: Sequence[int] = ()):
        super().__init__(config, stage, num_stages)
        if stage in (sharing or (0, num_stages - 1)):
            self.tied = nn.Parameter(torch.linspace(0.5, 1.5, support.HIDDEN, dtype=torch.double))
            self.tied.shared_embedding = True  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor | None) -> torch.Tensor:
        if self.is_first:
            assert x is not None
            return super().forward(x * self.tied)
        if hasattr(self, "tied"):
            assert self.input_tensor is not None
            self.input_tensor = self.input_tensor * self.tied
        return super().forward(x)


def _alone(num_stages: int, per_token: bool, seeds: list[int], sharing: Sequence[int] = ()) -> list[_TiedChunk]:
    """Gradients of all chunks from all batches, in one process; the tied weight is one."""
    chunks = [_TiedChunk(support.config_of(), stage, num_stages, sharing) for stage in range(num_stages)]
    owners = [chunk for chunk in chunks if hasattr(chunk, "tied")]
    for chunk in owners[1:]:
        chunk.tied = owners[0].tied
    tokens = 0
    for seed in seeds:
        for batch in support.batches(seed, COUNT):
            x = batch["x"]
            for chunk in chunks:
                chunk.set_input_tensor([None if chunk.is_first else x])
                x = chunk(x)
            loss = support.loss_func("tokens" if per_token else "mean", batch["weights"], x)[0]
            tokens += int(batch["weights"].sum())
            (loss if per_token else loss / COUNT / len(seeds)).backward()
    if per_token:
        for parameter in {p for chunk in chunks for p in chunk.parameters()}:
            parameter.grad /= tokens
    return chunks


def _wrap(stages: list[int], num_stages: int, ddp_options: dict[str, Any], config_options: dict[str, Any]) -> Any:
    """This rank's chunks, wrapped, with the config's functions as Megatron's training loop sets them."""
    config = support.config_of(finalize_model_grads_func=megatron.finalize_model_grads, **config_options)
    ddp_config = megatron.DistributedDataParallelConfig(**ddp_options)
    models = []
    for i, stage in enumerate(stages):
        model = megatron.DistributedDataParallel(
            config, ddp_config, _TiedChunk(config, stage, num_stages), disable_bucketing=i > 0
        )
        model.broadcast_params()
        models.append(model)
    return config, models


def _is_one(functions: list[Any]) -> Any:
    return functions[0] if len(functions) == 1 else functions


def _compare(rank: int, world_size: int, cases: int, seed: int) -> None:
    rng = random.Random(seed)
    for case in range(cases):
        chunks = rng.choice([1, 2])
        parallel_state.initialize_model_parallel(
            pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None
        )
        pp_rank, replica = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_data_parallel_rank()
        overlap, sharded, per_token = rng.random() < 0.7, rng.random() < 0.4, rng.random() < 0.5
        sets_functions, aligns = rng.random() < 0.7, rng.random() < 0.5
        ddp_options = {
            "overlap_grad_reduce": overlap,
            "use_distributed_optimizer": sharded,
            "bucket_size": rng.choice([None, 20]),
            "overlap_param_gather": sharded and overlap,
        }
        config_options = {
            "calculate_per_token_loss": per_token,
            "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        }
        context = f"seed {seed}, case {case}: {chunks} {ddp_options} {config_options} {sets_functions} {aligns}"
        stages = [pp_rank + 2 * chunk for chunk in range(chunks)]
        config, models = _wrap(stages, 2 * chunks, ddp_options, config_options)
        if overlap and sets_functions:
            config.no_sync_func = _is_one([model.no_sync for model in models])
            if aligns:
                config.grad_sync_func = _is_one([model.start_grad_sync for model in models])
                if sharded:
                    config.param_sync_func = _is_one([model.start_param_sync for model in models])
        expected = _alone(2 * chunks, per_token, [7, 8])
        kind = "tokens" if per_token else "mean"
        optimizer = DistributedOptimizer(
            torch.optim.SGD([parameter for model in models for parameter in model.parameters()]),
            models,
            model_parallel_group=parallel_state.get_model_parallel_group(),
            tensor_parallel_group=parallel_state.get_tensor_model_parallel_group(),
            overlap_param_gather_with_optimizer_step=sharded and aligns,
        )
        grads = [parameter.grad for parameter in {p for chunk in expected for p in chunk.parameters()}]
        norm = torch.nn.utils.get_total_norm(grads)
        for _ in range(2):
            for model in models:
                model.zero_grad_buffer()
            iterators = [support.batches(7 + replica, COUNT) for _ in models]
            support_arguments = support.arguments(
                _is_one(models),
                COUNT,
                forward_step_func=partial(support.forward_step, kind, []),
                data_iterator=_is_one(iterators),
                force_all_reduce=sharded,
            )
            megatron.get_forward_backward_func()(**support_arguments)
            for stage, model in zip(stages, models):
                for mine, other in zip(model.module.parameters(), expected[stage].parameters()):
                    assert torch.allclose(mine.main_grad, other.grad, rtol=1e-6, atol=1e-9), (context, stage)
            assert optimizer.grad_norm().item() == pytest.approx(norm.item(), rel=1e-6), context
        optimizer.step()
        for stage, model in zip(stages, models):
            if sharded:
                model.start_param_sync(force_sync=True)
            for mine, other in zip(model.module.parameters(), expected[stage].parameters()):
                assert torch.allclose(mine, other - 1e-3 * other.grad, rtol=1e-6, atol=1e-9), (context, stage)
        parallel_state.destroy_model_parallel()
    await_all(rank, world_size)


@pytest.mark.sample(1)
@pytest.mark.parametrize("backend", ["gloo", "farandole"])
def test_a_pipeline_of_two_with_two_replicas_has_the_gradients_of_one_process(backend):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    run_ranks(_compare, 4, backend, timeout=120, cases=cases(10), seed=seed)


def _three_share(rank: int, world_size: int, sharing: list[int]) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=world_size)
    # As Megatron's get_embedding_ranks may have it; who is not in the group has None.
    embedding = dist.new_group(sharing)
    groups = SimpleNamespace(
        tp=None,
        pp=parallel_state.get_pipeline_model_parallel_group(),
        embd=embedding if rank in sharing else None,
        pos_embd=embedding if rank in sharing else None,
        dp_cp=parallel_state.get_data_parallel_group(),
    )
    config = support.config_of()
    model = megatron.DistributedDataParallel(
        config, megatron.DistributedDataParallelConfig(), _TiedChunk(config, rank, world_size, sharing)
    )
    expected = _alone(world_size, False, [7], sharing)[rank]
    for _ in range(2):
        model.zero_grad_buffer()
        step = support.arguments(
            model,
            COUNT,
            forward_step_func=partial(support.forward_step, "mean", []),
            data_iterator=support.batches(7, COUNT),
        )
        megatron.get_forward_backward_func()(**step)
        megatron.finalize_model_grads([model], pg_collection=groups)
        for (name, mine), other in zip(model.module.named_parameters(), expected.parameters()):
            assert torch.allclose(mine.main_grad, other.grad, rtol=1e-6, atol=1e-9), (rank, name)
    parallel_state.destroy_model_parallel()
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", ["gloo", "farandole"])
@pytest.mark.parametrize("sharing", [[0, 1, 3], [0, 1, 2, 3]])
def test_an_embedding_that_more_than_two_stages_hold_has_the_sum_of_all(backend, sharing):
    run_ranks(_three_share, 4, backend, timeout=60, sharing=sharing)


class _Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(sequence_parallel=True, qk_layernorm=True)
        self.norm = nn.Parameter(torch.ones(2))
        self.norm.sequence_parallel = True  # type: ignore[attr-defined]
        self.q_layernorm = nn.Parameter(torch.ones(2))
        self.averaged = nn.Parameter(torch.ones(2))
        self.averaged.average_gradients_across_tp_domain = True  # type: ignore[attr-defined]
        self.own = nn.Parameter(torch.ones(2))

    def forward(self, x: float) -> torch.Tensor:
        return x * sum(parameter.sum() for parameter in self.parameters())


def _tensor_ranks(rank: int, world_size: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    module = _Norms()
    model = megatron.DistributedDataParallel(module.config, megatron.DistributedDataParallelConfig(), module)
    model(1.0 + rank).backward()
    megatron.finalize_model_grads([model])
    values = {name: parameter.main_grad.unique().tolist() for name, parameter in module.named_parameters()}
    assert values == {"norm": [3.0], "q_layernorm": [3.0], "averaged": [1.5], "own": [1.0 + rank]}
    module.config.flextron = True
    with pytest.raises(NotImplementedError, match="flextron"):
        megatron.finalize_model_grads([model])
    await_all(rank, world_size)


@pytest.mark.parametrize("backend", ["gloo", "farandole"])
def test_what_tensor_ranks_share_is_reduced_over_them(backend):
    run_ranks(_tensor_ranks, 2, backend)


def _conditional(rank: int, world_size: int) -> None:
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    module = _Norms()
    module.config = SimpleNamespace(has_cond_embedder=True)
    module.own.pipeline_parallel = True
    model = megatron.DistributedDataParallel(module.config, megatron.DistributedDataParallelConfig(), module)
    model(1.0 + rank).backward()
    megatron.finalize_model_grads([model], torch.tensor([4 * rank]))
    # Tokens are those of the last stage.
    assert module.own.main_grad.unique().tolist() == [0.75] and module.norm.main_grad.unique().tolist() == [
        (1.0 + rank) / 4
    ]
    dist.barrier()


def test_conditional_embedders_are_reduced_over_the_pipeline_and_tokens_come_from_its_end():
    run_ranks(_conditional, 2, "gloo")


def _fails(rank: int, world_size: int, overlap: bool) -> tuple[float, str]:
    """Stage 0 of one of two pipelines raises in its third microbatch."""
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)
    stage, replica = parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    config, (model,) = _wrap([stage], 2, {"overlap_grad_reduce": overlap}, {})
    if overlap:
        config.no_sync_func, config.grad_sync_func = model.no_sync, model.start_grad_sync
    begun = [0]

    def forward_step(iterator: Any, model: Any) -> Any:
        begun[0] += 1
        if (stage, replica, begun[0]) == (0, 1, 3):
            raise KeyError("no luck")
        return support.forward_step("mean", [], iterator, model)

    start = time.monotonic()
    with pytest.raises((KeyError, RuntimeError)) as raised:
        megatron.get_forward_backward_func()(**support.arguments(model, COUNT, forward_step_func=forward_step))
        megatron.finalize_model_grads([model])
    result = time.monotonic() - start, str(raised.value)
    await_all(rank, world_size)
    return result


@pytest.mark.sample(2)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("gloo", marks=only_on_cpu("torch's NCCL ends processes that wait for one that gave up")),
        "farandole",
    ],
)
def test_a_stage_that_raises_ends_the_step_of_all_replicas(backend, overlap):
    for seconds, error in run_ranks(_fails, 4, backend, timeout=60, overlap=overlap):
        assert seconds < (5 if ON_CPU else 30) and "no luck" in error, (seconds, error)
