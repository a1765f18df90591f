"""finalize_model_grads does what Megatron-core's does in the same order: every collective, chunk and timer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from farandole import megatron
from megatron_api import megatron_support as support
from support.devices import seeded
from support.megatrons import cases, check_version, environment_of, every_megatron, import_distributed
from support.processes import await_all, run_ranks

# Of parameters, by what finalize_model_grads does with them: no two have as many elements, so that each collective
# tells what it is for.
_SIZES = {"own": 2, "conditional": 3, "sequence": 5, "q_layernorm": 7, "averaged": 11, "word": 13, "position": 17}
_EXPERTS = 19


class _Chunk(nn.Module):
    """A chunk as finalize_model_grads takes it, which notes what is done with it."""

    def __init__(self, config: Any, seed: int, number: int, log: list[Any]):
        super().__init__()
        generator = seeded(seed + 100 * dist.get_rank() + number)
        self.config, self.number, self.log = config, number, log
        self.ddp_config = megatron.DistributedDataParallelConfig()
        self.pre_process = True
        self.share_embeddings_and_output_weights = config.ties_words
        for name, numel in _SIZES.items():
            parameter = nn.Parameter(torch.zeros(numel, dtype=torch.double))
            parameter.main_grad = torch.randn(numel, dtype=torch.double, generator=generator)
            parameter.pipeline_parallel = name == "conditional"
            parameter.sequence_parallel = name == "sequence"
            parameter.average_gradients_across_tp_domain = name == "averaged"
            self.register_parameter(name, parameter)
        self.position_embeddings = nn.Module()
        self.position_embeddings.weight = self.position
        self.router = _Router(config, generator, log)

    def shared_embedding_or_output_weight(self) -> nn.Parameter:
        return self.word

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        self.log.append(("finish", self.number, force_all_reduce))

    @torch.no_grad()
    def scale_gradients(self, factor: torch.Tensor) -> None:
        self.log.append(("scale", self.number))
        for parameter in self.parameters():
            parameter.main_grad *= factor

    def state(self) -> list[torch.Tensor]:
        return [parameter.main_grad for parameter in self.parameters()] + list(self.router.buffers())


class _Router(nn.Module):
    def __init__(self, config: Any, generator: torch.Generator, log: list[Any]):
        super().__init__()
        self.register_buffer("expert_bias", torch.zeros(_EXPERTS))
        self.register_buffer("local_tokens_per_expert", torch.randint(9, (_EXPERTS,), generator=generator).float())
        if config.moe_router_load_balancing_type == "quantile_balancing":
            self.register_buffer("qb_beta", torch.zeros(_EXPERTS))
            self.register_buffer("qb_beta_accum", torch.randn(_EXPERTS, generator=generator))
            self.register_buffer("qb_beta_count", torch.tensor(3))
        elif config.moe_router_load_balancing_type == "global_aux_loss":
            self.reset_global_aux_loss_tracker = lambda: log.append("reset")


def _config(rng: random.Random, newer: bool, recorder: support.Recorder) -> Any:
    config = megatron.ModelParallelConfig()
    config.__dict__.update(
        ties_words=rng.random() < 0.7,
        has_cond_embedder=rng.random() < 0.7,
        sequence_parallel=rng.random() < 0.7,
        qk_layernorm=rng.random() < 0.5,
        mtp_num_layers=rng.choice([None, 1]),
        moe_router_enable_expert_bias=rng.random() < 0.7,
        moe_router_bias_update_rate=0.25,
        moe_router_load_balancing_type=rng.choice(["global_aux_loss", "quantile_balancing" if newer else "none"]),
        moe_router_quantile_balancing_ema=0.5,
        calculate_per_token_loss=True,
        timers=recorder.timers if rng.random() < 0.7 else None,
        barrier_with_L1_time=rng.random() < 0.5,
        gtp_weight_remat_size=1,
        expert_gtp_weight_remat_size=1,
    )
    return config


@contextmanager
def _noting_collectives(log: list[Any]) -> Iterator[None]:
    """Of more ranks than one; an average may be a sum that is divided."""

    def noting(name: str) -> Any:
        plain = getattr(dist, name)

        def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            group = kwargs["group"]
            if group.size() > 1:
                log.append((name, dist.get_process_group_ranks(group), tensor.numel()))
            return plain(tensor, *args, **kwargs)

        return mock.patch.object(dist, name, call)

    with noting("all_reduce"), noting("broadcast"):
        yield


def _run(function: Any, rng: random.Random, newer: bool) -> tuple[list[Any], list[torch.Tensor]]:
    recorder = support.Recorder()
    config = _config(rng, newer, recorder)
    seed, force = rng.randrange(2**20), rng.choice([False, True])
    chunks = [_Chunk(config, seed, number, recorder.log) for number in range(rng.choice([1, 2]))]
    # Of the last stage they count. There may be none; 0.16 then scales nothing.
    count = rng.choice([0, 3] if newer else [3])
    tokens = torch.tensor(count * (1 + dist.get_rank())) if rng.random() < 0.7 else None
    with _noting_collectives(recorder.log):
        function(chunks, tokens, force_all_reduce=force)
    values = [value for chunk in chunks for value in chunk.state()]
    return recorder.log, values if tokens is None else [*values, tokens]


def _compare(rank: int, world_size: int, version: str, cases: int, seed: int) -> None:
    theirs = import_distributed()
    check_version(version)
    from megatron.core import parallel_state as their_state

    rng = random.Random(seed)
    seen = set()
    for tensor, pipeline in ((2, 2), (1, 4), (1, 2), (2, 1)):
        their_state.initialize_model_parallel(
            tensor,
            pipeline,
            get_position_embedding_ranks=lambda ranks, *_: ranks[:2],
            create_gloo_process_groups=False,
        )
        for case in range(cases):
            drawn = rng.randrange(2**31)
            ours, expected = (
                _run(function, random.Random(drawn), version >= "0.19")
                for function in (megatron.finalize_model_grads, theirs.finalize_model_grads)
            )
            context = f"seed {seed}, {tensor} x {pipeline}, case {case}"
            assert ours[0] == expected[0], f"{context}:\n{ours[0]}\nexpected\n{expected[0]}"
            for mine, other in zip(ours[1], expected[1], strict=True):
                torch.testing.assert_close(mine, other, msg=f"{context}: {mine}, expected {other}")
            seen |= {entry[2] for entry in ours[0] if entry[0] == "all_reduce"}
        their_state.destroy_model_parallel()
    assert {3, 11, 13, 17} <= seen, "all of them were met"  # over the pipeline, tensor ranks, both embeddings
    await_all(rank, world_size)


@every_megatron
def test_the_order_is_megatrons(version):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    # gloo has no AVG, which Megatron-core takes.
    run_ranks(_compare, 4, "farandole", 120, environment_of(version), version=version, cases=cases(20), seed=seed)
