"""Names of the state of parameters that have one name in the modules of different ranks."""

from __future__ import annotations

from typing import Any

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


def told_apart(
    named: list[list[tuple[str, torch.Tensor]]], model_parallel_group: dist.ProcessGroup | None
) -> list[list[tuple[str, torch.Tensor]]]:
    """The same, with "[1/2]" after a name that two ranks of ``model_parallel_group`` have, on the second of them.

    Tensor-parallel ranks have all names in common, and so have stages that number their layers from zero.
    """
    mine = [name for parameters in named for name, _ in parameters]
    ranks = [set(names) for names in _gather(mine, model_parallel_group)]
    rank = 0 if model_parallel_group is None else model_parallel_group.rank()

    def told(name: str) -> str:
        holders = [other for other, names in enumerate(ranks) if name in names]
        return f"{name}[{holders.index(rank)}/{len(holders)}]" if len(holders) > 1 else name

    return [[(told(name), parameter) for name, parameter in parameters] for parameters in named]


def on_all_stages(names: list[list[str]], model_parallel_group: dist.ProcessGroup | None) -> list[list[str]]:
    """The names in each of this rank's param groups, and those that other ranks of ``model_parallel_group`` have in it.

    A checkpoint has the param groups of one rank, for all.
    """
    ranks = _gather(names, model_parallel_group)
    return [
        list(dict.fromkeys(name for groups in ranks if index < len(groups) for name in groups[index]))
        for index in range(len(names))
    ]


def _gather(mine: Any, group: dist.ProcessGroup | None) -> list[Any]:
    if group is None or group.size() == 1:
        return [mine]
    ranks: list[Any] = [None] * group.size()
    dist.all_gather_object(ranks, mine, group=group)
    return ranks
