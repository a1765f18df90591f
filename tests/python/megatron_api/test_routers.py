"""What routers of experts learn without gradients, beside Megatron-core's finalize_model_grads."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from farandole import megatron
from farandole.megatron import parallel_state
from support.devices import seeded
from support.megatrons import cases, check_version, environment_of, every_megatron, import_distributed
from support.processes import await_all, run_ranks

EXPERTS = 5


class _Router(nn.Module):
    def __init__(self, rng: random.Random, generator: torch.Generator, quantiles: bool, may_rest: bool):
        super().__init__()
        self.local_tokens_per_expert = torch.randint(0, 9, (EXPERTS,), generator=generator).float()
        self.expert_bias = torch.randn(EXPERTS, generator=seeded(rng.randrange(99)))
        self.frozen_expert_bias = may_rest and rng.random() < 0.2
        if quantiles:
            self.qb_beta = torch.randn(EXPERTS, generator=seeded(rng.randrange(99)))
            self.qb_beta_accum = torch.randn(EXPERTS, generator=generator)
            self.qb_beta_count = torch.tensor(rng.randint(0, 3))
        self.train(not may_rest or rng.random() < 0.8)


class _Model(nn.Module):
    """As finalize_model_grads takes it, with nothing to reduce."""

    def __init__(self, config: Any, seed: int, rank: int, may_rest: bool = False):
        super().__init__()
        rng, generator = random.Random(seed), seeded(seed + rank)
        self.config = config
        self.ddp_config = megatron.DistributedDataParallelConfig()
        quantiles = config.moe_router_load_balancing_type == "quantile_balancing"
        self.routers = nn.ModuleList(_Router(rng, generator, quantiles, may_rest) for _ in range(rng.randint(0, 3)))

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        pass


def _state(models: list[_Model]) -> list[torch.Tensor]:
    return [
        value
        for model in models
        for router in model.routers
        for value in vars(router).values()
        if isinstance(value, torch.Tensor)
    ]


def _config(rng: random.Random, quantiles: bool) -> Any:
    config = megatron.ModelParallelConfig()
    config.__dict__.update(
        moe_router_enable_expert_bias=rng.random() < 0.8,
        moe_router_bias_update_rate=rng.choice([1e-3, 0.25]),
        moe_router_load_balancing_type=rng.choice(["none", "quantile_balancing"] if quantiles else ["none"]),
        moe_router_quantile_balancing_ema=rng.choice([0.0, 0.9]),
        sequence_parallel=False,
        qk_layernorm=False,
        gtp_weight_remat_size=1,
        expert_gtp_weight_remat_size=1,
    )
    return config


def _compare(rank: int, world_size: int, version: str, cases: int, seed: int) -> None:
    theirs = import_distributed()
    check_version(version)
    from megatron.core import parallel_state as their_state

    their_state.initialize_model_parallel()
    rng = random.Random(seed)
    is_newer = version >= "0.19"  # the one before updates all
    for case in range(cases):
        config = _config(rng, quantiles=is_newer)
        seeds = [rng.randrange(2**31) for _ in range(2)]
        ours, expected = ([_Model(config, chunk, rank, is_newer) for chunk in seeds] for _ in range(2))
        megatron.finalize_model_grads(ours)
        theirs.finalize_model_grads(expected)
        for mine, other in zip(_state(ours), _state(expected), strict=True):
            torch.testing.assert_close(mine, other, msg=f"seed {seed}, case {case}: {mine}, expected {other}")
    await_all(rank, world_size)


@every_megatron
def test_biases_of_experts_are_megatrons(version):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    # gloo has no AVG, which Megatron-core takes.
    run_ranks(_compare, 2, "farandole", env=environment_of(version), version=version, cases=cases(50), seed=seed)


def _without_collection(rank: int, world_size: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = _config(random.Random(1), quantiles=False)
    config.moe_router_enable_expert_bias, config.moe_router_bias_update_rate = True, 0.25
    model, router = _Model(config, 0, rank), nn.Module()
    model.routers = nn.ModuleList([router])
    router.expert_bias = torch.zeros(4)
    # Of one tensor group, or of one group of replicas, the second place has more than the mean.
    router.local_tokens_per_expert = torch.tensor([[9.0, 9, 1, 1], [9, 1, 1, 5], [9, 1, 1, 5], [9, 5, 5, 5]])[rank]
    megatron.finalize_model_grads([model])
    assert router.expert_bias.tolist() == [-0.25, 0.25, 0.25, 0.25]
    assert not router.local_tokens_per_expert.any()
    without = SimpleNamespace(tp=None, pp=None, embd=None, pos_embd=None, dp_cp=None)
    with pytest.raises(ValueError, match="tp_dp_cp"):
        megatron.finalize_model_grads([model], pg_collection=without)
    await_all(rank, world_size)


def test_tokens_of_tensor_ranks_and_replicas_count():
    run_ranks(_without_collection, 4, "farandole")
