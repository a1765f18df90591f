"""What becomes of a stage's output on the last stage, and the scales of auxiliary losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from farandole.megatron._config import StepConfig


@dataclass
class Collected:
    """What the last stage gathers over a step."""

    data: list[Any]  # what the forward-backward function returns
    num_tokens: torch.Tensor  # for finalize_model_grads_func


def take_loss(
    output: Any,
    loss_func: Callable[..., Any] | None,
    config: StepConfig,
    collected: Collected,
    num_microbatches: int,
    cp_size: int,
    collect_non_loss_data: bool,
) -> Any:
    """Megatron's: the loss whose gradients a backward takes, divided by what ``loss_func`` says.

    ``loss_func(output)`` returns (loss, reduced): the loss is divided by the number of microbatches; or (loss,
    num_tokens, reduced): also by the tokens, or, with ``config.calculate_per_token_loss``, by nothing. Divisions are in
    place, as Megatron's are.
    """
    if loss_func is None:
        collected.data.append(output)
        return output
    if collect_non_loss_data:
        collected.data.append(loss_func(output, non_loss_data=True))
        return output
    returned = loss_func(output)
    if not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3):
        shown = f"{len(returned)} values" if isinstance(returned, (tuple, list)) else f"a {type(returned).__name__}"
        raise TypeError(f"loss_func returned {shown}, expected (loss, reduced) or (loss, num_tokens, reduced)")
    if len(returned) == 3:
        loss, num_tokens, reduced = returned
        if not config.calculate_per_token_loss:
            loss /= torch.clamp(torch.as_tensor(num_tokens), min=1)
            loss /= num_microbatches
        collected.num_tokens += torch.as_tensor(num_tokens).detach()  # in its dtype, which all ranks have
    else:
        loss, reduced = returned
        loss *= cp_size
        loss /= num_microbatches
    collected.data.append(reduced)
    return loss


def set_auxiliary_loss_scales(config: StepConfig, num_microbatches: int, cp_size: int, device: torch.device) -> None:
    """Of the losses that Megatron-core's layers add by themselves, on every stage: those of MoE, of multi-token
    prediction and of sparse attention.
    """
    divisor = 1 if config.calculate_per_token_loss else num_microbatches
    part = 1 if config.calculate_per_token_loss else cp_size  # the main loss is multiplied by it, too
    if config.num_moe_experts is not None:
        from megatron.core.transformer.moe.router import MoEAuxLossAutoScaler

        MoEAuxLossAutoScaler.set_loss_scale(_loss_scale(config, "moe_grad_scale_func", device) * part / divisor)
    if config.mtp_num_layers is not None:
        from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

        MTPLossAutoScaler.set_loss_scale(_loss_scale(config, "mtp_grad_scale_func", device) / divisor)
    set_attention_scale = _setter_of_attention(config.source)
    if set_attention_scale is not None:
        set_attention_scale(_loss_scale(config, None, device) * part / divisor)


def _setter_of_attention(config: Any) -> Callable[[torch.Tensor], Any] | None:
    setter = getattr(config, "experimental_attention_variant_loss_scale_func", None)
    if setter is None and getattr(config, "experimental_attention_variant", None) == "dsa":
        from megatron.core.transformer.experimental_attention_variant import dsa

        setter = dsa.DSAIndexerLossAutoScaler.set_loss_scale
    return setter


def _loss_scale(config: StepConfig, name: str | None, device: torch.device) -> torch.Tensor:
    own = None if name is None else getattr(config.source, name, None)
    if own is not None:
        scale = torch.as_tensor(own())
    elif config.grad_scale_func is not None:
        scale = torch.as_tensor(config.grad_scale_func(torch.ones(1, device=device)))
    else:
        scale = torch.ones(1, device=device)
    if scale.numel() != 1:
        raise ValueError(f"{name or 'grad_scale_func'} returned a tensor of {scale.numel()} elements, expected 1")
    return scale
