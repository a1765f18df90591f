"""Names of the state of experts, which have one name in the modules of different ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist

from farandole.ddp._wrapper import DistributedDataParallel


def expert_suffix(models: list[DistributedDataParallel]) -> str | None:
    """What tells this rank's experts from those of others: "[1/4]" where four groups of ranks have different ones.

    They are numbered by their ranks, so that any number of ranks for each group gives the same names. Empty where all
    ranks have the same experts; None where expert groups do not make up the data-parallel group. A collective of it
    where experts have a group of their own.
    """
    for model in models:
        group, experts = model.replicas.group, model.experts.group
        if group is experts or not any(bucket.is_expert for bucket in model._reducer.buckets()):
            continue
        mine = sorted(dist.get_process_group_ranks(experts))
        theirs: list[list[int]] = [[] for _ in range(group.size())]
        dist.all_gather_object(theirs, mine, group=group)
        sets = sorted({tuple(ranks) for ranks in theirs})
        if sorted(rank for ranks in sets for rank in ranks) != sorted(dist.get_process_group_ranks(group)):
            return None
        return f"[{sets.index(tuple(mine))}/{len(sets)}]" if len(sets) > 1 else ""
    return ""


def trainable_of(model: DistributedDataParallel, prefix: str, suffix: str | None) -> list[tuple[str, torch.Tensor]]:
    """Trainable parameters with the names of their state."""
    experts = {index for bucket in model._reducer.buckets() if bucket.is_expert for index, _, _ in bucket.slots}
    names = [name for name, _ in model._reducer.main_grads()]
    return [
        (prefix + name + (suffix or "" if index in experts else ""), model._trainable[name])
        for index, name in enumerate(names)
    ]
