"""The Megatron benchmark as one rank runs it: the same training step by farandole.megatron and by Megatron-core."""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from farandole import megatron
from farandole.bench import _megatron_core
from farandole.bench._pipeline_rank import MICROBATCH, MICROBATCHES, SEQUENCE
from farandole.bench._ranks import RANKS, Rank

_HEADS = 4


class Chunk(nn.Module):
    """One transformer layer, sequence first, as Megatron's models take their input."""

    def __init__(self, config: Any, stage: int, num_stages: int):
        super().__init__()
        torch.manual_seed(stage)
        self.config, self.model_type = config, None
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        width = config.hidden_size
        self.layer = nn.TransformerEncoderLayer(
            width, _HEADS, dim_feedforward=4 * width, dropout=0.0, activation="gelu"
        )
        self.input_tensor: torch.Tensor | None = None

    def set_input_tensor(self, tensors: list[Any]) -> None:
        self.input_tensor = tensors[0]

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.layer(batch if self.is_first else self.input_tensor)


@dataclass
class _Prepared:
    function: Any
    models: list[Chunk]
    arguments: dict[str, Any]
    batches: list[torch.Tensor]


def run_steps(rank: Rank, peer: str, chunks: int, width: int, warm_up: int, count: int) -> list[tuple[float, float]]:
    """(start, end) of each step, on a clock that the host's processes share.

    The peer is "farandole", or "megatron" for Megatron-core over gloo.
    """
    key = (peer, chunks, width)
    if key not in rank.state:
        rank.state[key] = _prepare(rank, peer, chunks, width)
    prepared: _Prepared = rank.state[key]
    for _ in range(warm_up):
        _step(rank, prepared)
    return [_step(rank, prepared)[:2] for _ in range(count)]


def losses(rank: Rank, peer: str, chunks: int, width: int) -> list[float]:
    """Of one step, on the last stage; [] elsewhere."""
    return _step(rank, rank.state[peer, chunks, width])[2]


def _step(rank: Rank, prepared: _Prepared) -> tuple[float, float, list[float]]:
    for model in prepared.models:
        model.zero_grad(set_to_none=True)
    iterators = [iter(prepared.batches) for _ in prepared.models]
    is_list = len(iterators) > 1
    dist.barrier(rank.groups["farandole"])
    start = time.monotonic()
    reduced = prepared.function(data_iterator=iterators if is_list else iterators[0], **prepared.arguments)
    return start, time.monotonic(), [one["loss"].item() for one in reduced]


def _forward_step(iterator: Any, model: nn.Module) -> Any:
    batch = next(iterator)
    return model(batch), functools.partial(_loss, batch)


def _loss(target: torch.Tensor, output: torch.Tensor) -> Any:
    loss = nn.functional.mse_loss(output, target)
    return loss, {"loss": loss.detach().clone()}


def _prepare(rank: Rank, peer: str, chunks: int, width: int) -> _Prepared:
    schedules = _megatron_core.import_schedules()
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
    from megatron.core.transformer.transformer_config import TransformerConfig

    virtual = chunks if chunks > 1 else None
    config = TransformerConfig(
        num_layers=chunks * RANKS,
        hidden_size=width,
        num_attention_heads=_HEADS,
        pipeline_model_parallel_size=RANKS,
        virtual_pipeline_model_parallel_size=virtual,
        microbatch_group_size_per_vp_stage=RANKS,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,
        # Two ranks are neighbours on both sides: only unbatched are its messages told apart, by two groups.
        batch_p2p_comm=virtual is None,
        batch_p2p_sync=False,
    )
    models = [Chunk(config, c * RANKS + rank.rank, chunks * RANKS) for c in range(chunks)]
    generator = torch.Generator().manual_seed(width)
    batches = [torch.randn(SEQUENCE, MICROBATCH, width, generator=generator) for _ in range(MICROBATCHES)]
    name = f"forward_backward_pipelining_with{'out' if virtual is None else ''}_interleaving"
    one = SimpleNamespace(size=lambda: 1)
    communicator: Any = megatron.P2PCommunicator if peer == "farandole" else P2PCommunicator
    arguments = dict(
        forward_step_func=_forward_step,
        model=models if virtual else models[0],
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=MICROBATCH,
        p2p_communicator=communicator(rank.groups["farandole" if peer == "farandole" else "gloo"], config),
        pg_collection=SimpleNamespace(tp=one, cp=one, embd=None, pos_embd=None, pp=None, dp_cp=None),
    )
    return _Prepared(getattr(megatron if peer == "farandole" else schedules, name), models, arguments, batches)
