"""How a rank is called in errors, as C++ calls it."""

from __future__ import annotations

import torch.distributed as dist


def rank_name(group: dist.ProcessGroup | None) -> str:
    """This rank: "rank 1", and where its number among all ranks is another one "rank 1 (global rank 3)".

    Several groups have a rank 0: an error that crosses over to another one must tell which.

    Args:
        group: None is a group of this process alone.
    """
    if group is None:
        return "rank 0"
    rank = dist.get_rank()
    return f"rank {group.rank()}" + ("" if rank == group.rank() else f" (global rank {rank})")
