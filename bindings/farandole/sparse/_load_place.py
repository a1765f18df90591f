"""Whether batches may be taken from an iterator on another thread than the caller's, without a word of its owner."""

from __future__ import annotations

import sys
from typing import Any


def only_waits(source: Any) -> bool:
    """Whether its ``next`` does nothing but wait for other processes: an iterator of torch's DataLoader with workers,
    which read and collate, and with a sampler of torch's, the one part that runs in ``next``.

    Others may be bound to their thread (a database's cursor, a lock), see what belongs to it (context variables), or do
    collectives, which would meet those of the forward.
    """
    loaders = sys.modules.get("torch.utils.data.dataloader")  # else there is none
    if loaders is None or type(source) is not loaders._MultiProcessingDataLoaderIter:
        return False
    sampler = getattr(source, "_index_sampler", None)
    return _is_plain(sampler) and _is_plain(getattr(sampler, "sampler", ()))  # of a BatchSampler


def _is_plain(sampler: Any) -> bool:
    return type(sampler) in (list, tuple, range) or type(sampler).__module__.startswith("torch.utils.data.")
