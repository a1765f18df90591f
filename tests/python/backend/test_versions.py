"""Autograd refuses what collectives have overwritten where it does so over gloo."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from support.devices import DEVICE, backend_for, only_on_cpu
from support.processes import run_ranks

pytestmark = only_on_cpu("gloo is what says which writes are seen")


def _calls(rank: int, group: dist.ProcessGroup) -> dict[str, Callable[[torch.Tensor], object]]:
    """Each writes to a tensor of four elements."""
    two, eight = torch.ones(2), torch.ones(8)
    whole = [torch.ones(4), torch.ones(4)]

    def halves(x: torch.Tensor) -> list[torch.Tensor]:
        return [x[:2], x[2:]]

    return {
        "all_reduce": lambda x: dist.all_reduce(x, group=group),
        "all_reduce_coalesced": lambda x: dist.all_reduce_coalesced([x], group=group),
        "all_gather": lambda x: dist.all_gather(halves(x), two, group=group),
        "all_gather with gaps": lambda x: dist.all_gather(list(x.view(2, 2).t()), two, group=group),
        "all_gather_into_tensor": lambda x: dist.all_gather_into_tensor(x, two, group=group),
        "all_gather_coalesced": lambda x: dist.all_gather_coalesced([[x[:2]], [x[2:]]], [two], group=group),
        "gather": lambda x: dist.gather(two, halves(x) if rank == 0 else None, group=group),
        "reduce_scatter": lambda x: dist.reduce_scatter(x, whole, group=group),
        "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(x, eight, group=group),
        "broadcast": lambda x: dist.broadcast(x, 0, group=group),
        "reduce": lambda x: dist.reduce(x, 0, group=group),
        "scatter": lambda x: dist.scatter(x, whole if rank == 0 else None, group=group),
        "all_to_all_single": lambda x: dist.all_to_all_single(x, torch.ones(4), group=group),
    }


def _compare(rank: int, world_size: int) -> None:
    gloo = dist.new_group(backend=backend_for("gloo"))
    ours, theirs = (_calls(rank, group) for group in (dist.group.WORLD, gloo))
    for name, call in ours.items():
        x, y = torch.zeros(4, device=DEVICE), torch.zeros(4, device=DEVICE)
        call(x)
        theirs[name](y)
        assert (x._version > 0) == (y._version > 0), name
        with torch.inference_mode():
            call(torch.zeros(4))
    weight, held = torch.ones(2, requires_grad=True), torch.ones(4)
    result = (weight.repeat(2) * held).sum()
    dist.all_gather_into_tensor(held, torch.full((2,), 5.0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.backward()


def test_writes_are_seen_as_over_gloo():
    run_ranks(_compare, 2, "farandole")
