"""Which sharded modules have caches that a prefetch fills."""

from __future__ import annotations

from typing import Any

from torch import nn

from farandole.sparse._sharded import is_torchrec

# torchrec's compute kernels whose tables are not all in the device's memory.
_CACHED_KERNELS = ("fused_uvm_caching", "key_value", "ssd_virtual_table", "dram_virtual_table")


def has_cache(module: nn.Module) -> bool:
    """Whether its ``prefetch`` does anything: torchrec's modules all have one."""
    if not is_torchrec(module):
        return callable(getattr(module, "prefetch", None))
    return any(
        getattr(table.compute_kernel, "value", None) in _CACHED_KERNELS
        for child in module.modules()
        for config in getattr(child, "grouped_configs", ())
        for table in config.embedding_tables
    )


def refuse_unlocked(name: str, module: nn.Module) -> None:
    """
    Raises:
        ValueError: rows could be evicted between the forward and the backward that use them.
    """
    for child in module.modules():
        kernel: Any = child
        if getattr(kernel, "prefetch_pipeline", True) or not _has_rows(getattr(kernel, "lxu_cache_weights", None)):
            continue
        raise ValueError(
            f"{name}: prefetch_pipeline=False in a {type(kernel).__name__}: expected True, since rows of one batch may "
            "else leave the cache for those of the next before its backward; make the sharder with "
            'fused_params={"prefetch_pipeline": True}'
        )


def _has_rows(weights: Any) -> bool:
    return weights is not None and weights.numel() > 0
