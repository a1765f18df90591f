"""The shapes of what passes between stages, which Megatron's models make known beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from farandole.megatron._config import StepConfig
from farandole.megatron._topology import Topology

Shape = Sequence[int]
AdjustShapes = Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]


@dataclass(frozen=True)
class Lengths:
    """What a caller says of the shapes of its batch."""

    seq_length: int  # of the encoder, where there are both
    micro_batch_size: int
    decoder_seq_length: int | None


def shapes_between(config: StepConfig, topology: Topology, lengths: Lengths, both: bool, rank: int) -> list[Shape]:
    """Of the tensors that pipeline rank ``rank`` sends: (sequence, microbatch, hidden), this rank's part of the sequence.

    Args:
        both: the model is an encoder and a decoder: ranks of the decoder send its output and relay the encoder's.
    """
    part = topology.cp_size * (topology.tp_size if config.sequence_parallel else 1)
    encoder = (lengths.seq_length // part, lengths.micro_batch_size, config.hidden_size)
    length = lengths.seq_length if lengths.decoder_seq_length is None else lengths.decoder_seq_length
    decoder = (length // part, lengths.micro_batch_size, config.hidden_size)
    if not both:
        return [decoder]
    return [decoder, encoder] if topology.is_after_split(rank) else [encoder]


@dataclass(frozen=True)
class DeclaredShapes:
    """What a rank's stages receive and send, each (sizes, dtype); None where shapes come with the tensors."""

    receives: list[tuple[list[int], torch.dtype]]
    sends: list[tuple[list[int], torch.dtype]]


def declared_shapes(
    config: StepConfig,
    topology: Topology,
    lengths: Lengths,
    both: bool,
    adjust: AdjustShapes | None,
) -> DeclaredShapes | None:
    """Of this rank; None where they are exchanged.

    Raises:
        ValueError: the config lacks what is needed, or a length is none.
    """
    if topology.pp_size == 1 or config.variable_seq_lengths or config.mtp_standalone:
        return None
    if not isinstance(config.hidden_size, int) or not isinstance(config.pipeline_dtype, torch.dtype):
        raise ValueError(
            f"config.hidden_size is {config.hidden_size!r} and config.pipeline_dtype is {config.pipeline_dtype!r}, "
            "expected an int and a torch.dtype: what passes between stages is (sequence, microbatch, hidden) of it; or "
            "set config.variable_seq_lengths"
        )
    given = {"seq_length": lengths.seq_length, "micro_batch_size": lengths.micro_batch_size}
    if lengths.decoder_seq_length is not None:
        given["decoder_seq_length"] = lengths.decoder_seq_length
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} is {value!r}, expected an int of at least 1")
    receives = shapes_between(config, topology, lengths, both, topology.pp_rank - 1)
    sends = shapes_between(config, topology, lengths, both, topology.pp_rank)
    if adjust is not None:
        receives, sends = adjust(receives, sends)
    dtype = config.pipeline_dtype
    return DeclaredShapes([(list(s), dtype) for s in receives], [(list(s), dtype) for s in sends])
