"""What Megatron-core's routers of experts learn without gradients, once for each step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


@torch.no_grad()
def update_expert_bias(model: Sequence[nn.Module], rate: float, groups: Sequence[Any]) -> None:
    """Moves each expert's bias by ``rate``, up where it gets less than the mean load, down where it gets more
    (https://arxiv.org/abs/2408.15664).

    Args:
        model: the rank's chunks. Routers that do not train, or have ``frozen_expert_bias``, are left alone. The others
            have ``expert_bias`` and ``local_tokens_per_expert``, both [experts].
        rate: ``moe_router_bias_update_rate`` of Megatron's config, in the unit of the bias.
        groups: the tokens of all ranks are counted by a sum over each of these, one after the other.
    """
    routers = [
        module
        for module in _modules(model)
        if getattr(module, "expert_bias", None) is not None
        and module.training
        and not getattr(module, "frozen_expert_bias", False)
    ]
    if not routers:
        return
    tokens = torch.stack([router.local_tokens_per_expert for router in routers])
    for group in groups:
        if group is not None:
            dist.all_reduce(tokens, group=group)
    moves = (tokens.sum(-1, keepdim=True) / tokens.shape[-1] - tokens).sign() * rate
    for router, move in zip(routers, moves, strict=True):
        router.expert_bias.add_(move)


@torch.no_grad()
def update_quantile_bias(model: Sequence[nn.Module], decay: float, group: Any) -> None:
    """Blends each router's ``qb_beta`` with the mean of the step's, over the group, and centers it.

    Args:
        model: the rank's chunks; routers that do not train are left alone. The others have ``qb_beta`` and
            ``qb_beta_accum``, both [experts], and the number of what was accumulated, ``qb_beta_count``.
        decay: the part of the old value that stays, 0 to 1.
        group: the ranks that saw other tokens; None is this one alone.
    """
    routers = [module for module in _modules(model) if _has_quantiles(module) and module.training]
    if not routers:
        return
    means = torch.stack([one.qb_beta_accum / one.qb_beta_count.clamp(min=1) for one in routers])
    if group is not None:
        dist.all_reduce(means, group=group)  # gloo has no AVG everywhere
        means /= group.size()
    blended = decay * torch.stack([one.qb_beta for one in routers]) + (1 - decay) * means
    for router, beta in zip(routers, blended - blended.mean(-1, keepdim=True), strict=True):
        router.qb_beta.copy_(beta)


@torch.no_grad()
def reset_counts(model: Sequence[nn.Module], has_expert_bias: bool) -> None:
    """What routers have counted begins anew.

    Args:
        model: the rank's chunks.
        has_expert_bias: of Megatron's config; tokens are counted anew only then.
    """
    for module in _modules(model):
        if has_expert_bias and getattr(module, "expert_bias", None) is not None:
            module.local_tokens_per_expert.zero_()
        if hasattr(module, "reset_global_aux_loss_tracker"):
            module.reset_global_aux_loss_tracker()
        if _has_quantiles(module):
            module.qb_beta_accum.zero_()
            module.qb_beta_count.zero_()


def _has_quantiles(module: nn.Module) -> bool:
    return getattr(module, "qb_beta_accum", None) is not None


def _modules(model: Sequence[nn.Module]) -> Iterator[Any]:
    for chunk in model:
        yield from chunk.modules()
