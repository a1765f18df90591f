"""Programs over groups that are made in other ways than by a list that all ranks know, for four ranks."""

from __future__ import annotations

import inspect

import torch
import torch.distributed as dist


def _in_torch(function, argument):
    return argument in inspect.signature(function).parameters


def made_by_members(rank, world_size, folder):
    """Groups that only their members make, one after another, and at once in two halves."""
    results = []
    halves = [[0, 2], [3, 1]]
    mine = next(ranks for ranks in halves if rank in ranks)
    for turn in range(3):
        group = dist.new_group(mine, use_local_synchronization=True, group_desc=f"half {turn}")
        x = torch.arange(4.0) + rank + turn
        dist.all_reduce(x, group=group)
        results.append((dist.get_process_group_ranks(group), x))
    ranks = [1] if rank == 1 else [0, 2, 3]  # torch counts groups, on all ranks alike
    group = dist.new_group(ranks, use_local_synchronization=True)
    whole = torch.empty(3 * len(ranks))
    dist.all_gather_into_tensor(whole, torch.full((3,), float(rank)), group=group)
    results.append(whole)
    return results


def in_another_order(rank, world_size, folder):
    """Ranks of a group that are not those of the world, in ascending order."""
    if not _in_torch(dist.new_group, "sort_ranks"):
        return None
    order = [3, 0, 2, 1]
    group = dist.new_group(order, sort_ranks=False)
    whole, part = torch.empty(4), torch.empty(2)
    dist.all_gather_into_tensor(whole, torch.tensor([float(rank)]), group=group)
    dist.reduce_scatter_tensor(part, torch.arange(8.0) * (rank + 1), group=group)
    given = torch.full((2,), float(rank))
    dist.broadcast(given, group_src=0, group=group)
    out = torch.empty(4)
    dist.all_to_all_single(out, torch.arange(4.0) + 10 * rank, group=group)
    into = torch.empty(1)
    here = group.rank()
    sends = dist.isend(torch.tensor([float(here)]), group=group, group_dst=(here + 1) % 4)
    dist.recv(into, group=group, group_src=(here - 1) % 4)
    sends.wait()
    return here, dist.get_process_group_ranks(group), whole, part, given, out, into


def subgroups(rank, world_size, folder):
    mine, all_of_them = dist.new_subgroups(2)
    listed, _ = dist.new_subgroups_by_enumeration([[0, 3], [1, 2]])
    results = [len(all_of_them)]
    for group in (mine, listed):
        x = torch.arange(3.0) * (rank + 1)
        dist.all_reduce(x, group=group)
        results.append((dist.get_process_group_ranks(group), group.rank(), x))
    for group in (mine, listed):
        dist.destroy_process_group(group)
    return results


def objects_between(rank, world_size, folder):
    """Objects from rank to rank, in batches, to ranks of a group, and gathered in a part of the world."""
    group = dist.new_group([1, 2, 3])
    mine = [{"rank": rank, "tensor": torch.arange(3) + rank}, ["x" * 100 * rank]]
    results = []
    for batched in ({}, {"use_batch": True}):
        into = [None, None]
        if rank == 0:
            dist.send_object_list(mine, 2, **batched)
        elif rank == 2:
            dist.recv_object_list(into, 0, **batched)
        results.append(into)
        into = [None, None]
        if rank == 3:
            dist.send_object_list(mine, group=group, group_dst=0, **batched)
        elif rank == 1:
            dist.recv_object_list(into, group=group, group_src=2, **batched)
        results.append(into)
    if rank != 0:
        everybody = [None] * 3
        dist.all_gather_object(everybody, mine, group=group)
        gathered = [None] * 3 if rank == 2 else None
        dist.gather_object(mine[1], gathered, group=group, group_dst=1)
        box = mine if rank == 3 else [None, None]
        dist.broadcast_object_list(box, group=group, group_src=2)
        results += [everybody, gathered, box]
    return results


def gathered_at_one(rank, world_size, folder):
    """torch 2.15's gather into one tensor; gloo has that of a list alone."""
    if not hasattr(dist, "gather_single"):
        return None
    x = torch.arange(6.0).view(2, 3) + 10 * rank
    whole = torch.empty(8, 3) if rank == 2 else None
    if dist.get_backend() == "gloo":
        dist.gather(x, None if whole is None else list(whole.chunk(4)), dst=2)
    else:
        dist.gather_single(x, whole, dst=2)
    return whole
