"""Lookups that fbgemm's kernels do not do as torchrec asks them to."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn


def refuse_dense_sequences(name: str, module: nn.Module, device: torch.device) -> None:
    """
    Raises:
        ValueError: an EmbeddingCollection on CPU has tables of the dense kernel, which pools there whatever it is asked
            for, and reads and writes beside its memory then. As its plan says, so on all ranks.
    """
    if device.type != "cpu":
        return
    kind = getattr(sys.modules.get("torchrec.distributed.embedding"), "ShardedEmbeddingCollection", None)
    for child in module.modules():
        if kind is None or not isinstance(child, kind):
            continue
        plan: dict[str, Any] = child.module_sharding_plan
        dense = [table for table, sharding in plan.items() if sharding.compute_kernel == "dense"]
        if dense:
            raise ValueError(
                f"{name}: tables {', '.join(dense)} of an EmbeddingCollection have compute_kernel='dense': expected "
                "'fused' on CPU, where fbgemm's dense kernel pools; shard them by table, row or column with "
                "compute_kernel='fused' and an optimizer of apply_optimizer_in_backward"
            )
