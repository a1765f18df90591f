"""The scales of losses that Megatron-core's layers add by themselves, beside those that its schedules set."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import torch

from farandole.megatron._config import StepConfig
from farandole.megatron._losses import set_auxiliary_loss_scales
from support.devices import DEVICE
from support.megatrons import cases, check_version, environment_of, every_megatron, import_schedules
from support.processes import run_ranks


def _config(rng: random.Random, is_newer: bool) -> Any:
    config = SimpleNamespace(
        calculate_per_token_loss=rng.random() < 0.5,
        num_moe_experts=rng.choice([None, 4]),
        mtp_num_layers=rng.choice([None, 1]),
        grad_scale_func=rng.choice([None, lambda x: x * 3]),
        timers=None,
    )
    if is_newer:
        config.moe_grad_scale_func = rng.choice([None, lambda: torch.tensor(5.0)])
        config.mtp_grad_scale_func = rng.choice([None, lambda: torch.tensor([7.0])])
        config.experimental_attention_variant = rng.choice([None, "dsa"])
    return config


def _compare(rank: int, world_size: int, version: str, cases: int, seed: int) -> None:
    schedules = import_schedules()
    check_version(version)
    from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    scalers: list[Any] = [MoEAuxLossAutoScaler, MTPLossAutoScaler]
    is_newer = version >= "0.19"
    if is_newer:
        from megatron.core.transformer.experimental_attention_variant.dsa import DSAIndexerLossAutoScaler

        scalers.append(DSAIndexerLossAutoScaler)
    rng = random.Random(seed)
    told: list[torch.Tensor] = []  # by a config's own function
    for case in range(cases):
        config = _config(rng, is_newer)
        if is_newer and rng.random() < 0.3:
            config.experimental_attention_variant_loss_scale_func = told.append
        count, cp = rng.randint(1, 8), rng.choice([1, 2])

        def theirs(config: Any = config, count: int = count, cp: int = cp) -> None:
            schedules.forward_step_calc_loss(
                None, torch.tensor(8.0), None, config, None, False, count, [], cp_group_size=cp, is_last_stage=True
            )

        def ours(config: Any = config, count: int = count, cp: int = cp) -> None:
            set_auxiliary_loss_scales(StepConfig(config), count, cp, torch.device(DEVICE))

        results = []
        for set_scales in (theirs, ours):
            told.clear()
            for scaler in scalers:
                scaler.main_loss_backward_scale = None
            set_scales()
            scales = [scaler.main_loss_backward_scale for scaler in scalers] + told
            results.append([None if scale is None else scale.reshape(-1).tolist() for scale in scales])
        assert results[0] == results[1], f"seed {seed}, case {case}: {vars(config)}"


@every_megatron
def test_scales_of_auxiliary_losses_are_megatrons(version):
    seed = random.SystemRandom().randrange(2**31)
    print(f"seed {seed}")
    run_ranks(_compare, 1, "gloo", env=environment_of(version), version=version, cases=cases(200), seed=seed)
