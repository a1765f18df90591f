"""What makes a step's gradients whole: over replicas, tied embeddings, tensor-parallel ranks, and by tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from farandole.megatron import parallel_state as own_state
from farandole.megatron._calls import call_with_what_it_takes
from farandole.megatron._config import StepConfig
from farandole.megatron._ddp import DistributedDataParallel
from farandole.megatron._models import get_attr_wrapped_model, get_model_config
from farandole.megatron._routers import reset_counts, update_expert_bias, update_quantile_bias
from farandole.megatron._timing import timed
from farandole.megatron._topology import parallel_state

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "flextron": (False, None),
    "gtp_weight_remat_size": (1, None),
    "expert_gtp_weight_remat_size": (1, None),
}


class _Groups:
    """Of the collection, or else of the global state; a group that is None is one of this rank alone.

    ``replicas`` are those to sum over, one after the other, for all ranks that route tokens to the same experts.
    """

    def __init__(self, pg_collection: Any, has_expert_bias: bool):
        self.replicas: list[Any] = []
        if pg_collection is not None:
            if has_expert_bias:
                self.replicas = [getattr(pg_collection, "tp_dp_cp", None)]
                if self.replicas[0] is None:
                    raise ValueError(
                        "pg_collection has no tp_dp_cp, expected the group with config.moe_router_enable_expert_bias"
                    )
            for name in ("tp", "pp", "embd", "pos_embd", "dp_cp"):
                if not hasattr(pg_collection, name):
                    raise ValueError(
                        f"pg_collection has no {name}, expected the group or None (Megatron-core's attribute)"
                    )
                setattr(self, name, getattr(pg_collection, name))
            return
        state = parallel_state()
        if state is None:
            raise RuntimeError(
                "model parallelism is not initialized, expected initialize_model_parallel() of "
                "megatron.core.parallel_state or of farandole.megatron.parallel_state before, or pg_collection"
            )
        self.tp = state.get_tensor_model_parallel_group()
        self.pp = state.get_pipeline_model_parallel_group()
        self.embd = call_with_what_it_takes(state.get_embedding_group, check_initialized=False)
        self.pos_embd = call_with_what_it_takes(state.get_position_embedding_group, check_initialized=False)
        self.dp_cp = call_with_what_it_takes(state.get_data_parallel_group, with_context_parallel=True)
        if has_expert_bias:
            self.replicas = (
                [self.tp, self.dp_cp]
                if state is own_state
                else [state.get_tensor_and_data_parallel_group(with_context_parallel=True)]
            )

    tp: Any
    pp: Any
    embd: Any
    pos_embd: Any
    dp_cp: Any


def finalize_model_grads(
    model: Sequence[nn.Module],
    num_tokens: torch.Tensor | None = None,
    pg_collection: Any = None,
    force_all_reduce: bool | None = False,
) -> None:
    """Megatron-core's of the same name: a config's ``finalize_model_grads_func``. Collective.

    In this order: the reduction over replicas ends; gradients of ``pipeline_parallel`` parameters are summed over the
    pipeline where the config has ``has_cond_embedder``; those of ``sequence_parallel`` parameters and of q and k
    layernorms are summed, those with ``average_gradients_across_tp_domain`` averaged, over tensor-parallel ranks; those
    of tied word embeddings, then of position embeddings, are summed over the stages that hold them; routers of experts
    get new biases (``moe_router_enable_expert_bias``, and the load balancing "quantile_balancing"); all gradients are
    divided by the number of tokens.

    Args:
        model: the rank's chunks, wrapped by :class:`DistributedDataParallel`.
        num_tokens: of this rank's batches, where losses are per token; it counts on the last stage, and becomes the
            number of all replicas.
        pg_collection: with tp, pp, embd, pos_embd and dp_cp, and tp_dp_cp where routers have a bias of experts; by
            default the groups of ``parallel_state``.
        force_all_reduce: see :meth:`DistributedDataParallel.finish_grad_sync`.

    A stage that has no ``shared_embedding_or_output_weight()`` may mark its tied weight by ``shared_embedding = True``.
    """
    config = get_model_config(model[0])
    for name, off in _UNSUPPORTED.items():
        if getattr(config, name, off[0]) not in off:
            raise NotImplementedError(
                f"config.{name} is {getattr(config, name)!r}, expected {off[0]!r}: finalize_model_grads does not support it"
            )
    has_expert_bias = bool(getattr(config, "moe_router_enable_expert_bias", False))
    groups = _Groups(pg_collection, has_expert_bias)
    step = StepConfig(config)
    with _timed(step, "all-grads-sync"):
        for chunk in model:
            call_with_what_it_takes(chunk.finish_grad_sync, force_all_reduce=force_all_reduce)
    with _timed(step, "conditional-embedder-grads-all-reduce"):
        if getattr(config, "has_cond_embedder", False) and _size(groups.pp) > 1:
            _sum_over_pipeline(model, groups.pp)
    with _timed(step, "non-tensor-parallel-grads-all-reduce"):
        if _size(groups.tp) > 1:
            _reduce_over_tensor_ranks(model, config, groups.tp)
    with _timed(step, "embedding-grads-all-reduce"):
        _sum_embedding(_word_embedding, model, config, groups.embd, groups.pp)
        _sum_embedding(_position_embedding, model, config, groups.pos_embd, groups.pp)
    if has_expert_bias:
        update_expert_bias(model, config.moe_router_bias_update_rate, groups.replicas)
    if getattr(config, "moe_router_load_balancing_type", None) == "quantile_balancing":
        update_quantile_bias(model, config.moe_router_quantile_balancing_ema, groups.dp_cp)
    reset_counts(model, has_expert_bias)
    if num_tokens is not None:
        _divide_by_tokens(model, num_tokens, groups)


def _timed(config: StepConfig, name: str) -> Any:
    return timed(config, name, 1, barrier=config.barrier_with_L1_time)


def _size(group: Any) -> int:
    return 1 if group is None else group.size()


def _trainable(model: Sequence[nn.Module]) -> Iterator[tuple[str, nn.Parameter]]:
    for chunk in model:
        for name, parameter in get_attr_wrapped_model(chunk, "named_parameters")():
            if parameter.requires_grad:
                yield name, parameter


def _grad_of(parameter: nn.Parameter) -> torch.Tensor | None:
    return parameter.main_grad if hasattr(parameter, "main_grad") else parameter.grad


def _sum_together(grads: list[torch.Tensor], group: Any) -> None:
    """One all-reduce for each type."""
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        alike = [grad for grad in grads if grad.dtype == dtype]
        flat = torch.cat([grad.reshape(-1) for grad in alike])
        dist.all_reduce(flat, group=group)
        for grad, reduced in zip(alike, flat.split([grad.numel() for grad in alike]), strict=True):
            grad.copy_(reduced.view_as(grad))


def _make_whole(chunk: nn.Module) -> None:
    """Of a sharded chunk a rank has its part of each gradient, which on another stage may be another part."""
    if isinstance(chunk, DistributedDataParallel):
        chunk.finish_grad_sync(force_all_reduce=True)


def _is_of_pipeline(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "pipeline_parallel", False)


@torch.no_grad()
def _sum_over_pipeline(model: Sequence[nn.Module], group: Any) -> None:
    for chunk in model:
        if any(map(_is_of_pipeline, chunk.parameters())):
            _make_whole(chunk)
    by_name: dict[str, list[torch.Tensor]] = {}
    for name, parameter in _trainable(model):
        grad = _grad_of(parameter)
        if _is_of_pipeline(parameter) and grad is not None:
            by_name.setdefault(name, []).append(grad)
    for first, *others in by_name.values():
        for other in others:
            first.add_(other)
    _sum_together([grads[0] for grads in by_name.values()], group)
    for first, *others in by_name.values():
        for other in others:
            other.copy_(first)


@torch.no_grad()
def _reduce_over_tensor_ranks(model: Sequence[nn.Module], config: Any, group: Any) -> None:
    summed, averaged = [], []
    is_sequence_parallel = getattr(config, "sequence_parallel", False)
    has_qk_layernorm = getattr(config, "qk_layernorm", False)
    for name, parameter in _trainable(model):
        grad = _grad_of(parameter)
        if grad is None:
            continue
        is_norm = has_qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
        if getattr(parameter, "average_gradients_across_tp_domain", False):
            averaged.append(grad)
        elif is_norm or (is_sequence_parallel and getattr(parameter, "sequence_parallel", False)):
            summed.append(grad)
    _sum_together(summed, group)
    _sum_together(averaged, group)
    for grad in averaged:  # gloo has no AVG everywhere
        grad.div_(group.size())


def _sum_embedding(weight_of: Any, model: Sequence[nn.Module], config: Any, group: Any, pp_group: Any) -> None:
    if _size(group) <= 1 or dist.get_rank() not in dist.get_process_group_ranks(group):
        return
    is_last = pp_group.rank() == pp_group.size() - 1
    # Its embedding of words is in the last chunk.
    has_mtp = weight_of is _word_embedding and bool(getattr(config, "mtp_num_layers", None))
    chunk = model[-1] if pp_group.rank() != 0 and (is_last or has_mtp) else model[0]
    weight = weight_of(chunk, config)
    grad = None if weight is None else _grad_of(weight)
    if grad is not None:
        if not getattr(weight, "shared_embedding", False):  # else it has a bucket of its own, alike on all stages
            _make_whole(chunk)
        dist.all_reduce(grad, group=group)


def _inner(chunk: nn.Module, attribute: str) -> Any:
    try:
        return get_attr_wrapped_model(chunk, attribute, return_model_obj=True)
    except RuntimeError:
        return None


def _word_embedding(chunk: nn.Module, config: Any) -> nn.Parameter | None:
    inner = _inner(chunk, "shared_embedding_or_output_weight")
    if inner is not None:
        is_tied = getattr(inner, "share_embeddings_and_output_weights", False)
        return inner.shared_embedding_or_output_weight() if is_tied or getattr(config, "mtp_num_layers", 0) else None
    marked = [parameter for _, parameter in _trainable([chunk]) if getattr(parameter, "shared_embedding", False)]
    if len(marked) > 1:
        raise ValueError(f"{len(marked)} parameters of a chunk have shared_embedding=True, expected one")
    return marked[0] if marked else None


def _position_embedding(chunk: nn.Module, config: Any) -> nn.Parameter | None:
    inner = _inner(chunk, "position_embeddings")
    return None if inner is None else inner.position_embeddings.weight


def _divide_by_tokens(model: Sequence[nn.Module], num_tokens: torch.Tensor, groups: _Groups) -> None:
    if _size(groups.pp) > 1:
        dist.broadcast(num_tokens, group=groups.pp, group_src=groups.pp.size() - 1)
    if groups.dp_cp is not None:
        dist.all_reduce(num_tokens, group=groups.dp_cp)
    factor = 1.0 / num_tokens.clamp(min=1)
    for chunk in model:
        get_attr_wrapped_model(chunk, "scale_gradients")(factor)
