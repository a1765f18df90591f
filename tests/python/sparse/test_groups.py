"""Groups of a pipeline's own, where the processes have other numbers of groups."""

from __future__ import annotations

import datetime

import pytest
import torch
import torch.distributed as dist

from farandole.sparse._groups import forget_group_of_its_own, group_of_its_own
from support.devices import only_on_cpu
from support.processes import run_ranks

HERE = torch.device("cpu")
LIMIT = datetime.timedelta(seconds=20)


def check(group: dist.ProcessGroup) -> None:
    total = torch.ones(())
    dist.all_reduce(total, group=group)
    assert total == group.size()


def make_some(rank: int, world_size: int) -> None:
    """Rank 1 is in two groups, the others in one."""
    groups = [dist.new_group(members, timeout=LIMIT) for members in ([0, 1], [1, 2])]
    for group in groups:
        if isinstance(group, dist.ProcessGroup):
            for _ in range(2):
                own = group_of_its_own(group, HERE)
                assert own is not None and own is not group and own is group_of_its_own(group, HERE)
                check(own)
                forget_group_of_its_own(group)  # as after a failure in it
    check(dist.group.WORLD)


def make_alone(rank: int, world_size: int) -> None:
    """One that a rank makes for itself counts there alone."""
    group = dist.new_group([0, 1], timeout=LIMIT)
    if rank == 1:
        dist.new_group([1], use_local_synchronization=True)
    if rank < 2:
        own = group_of_its_own(group, HERE)
        assert own is not None
        check(own)
    own = group_of_its_own(dist.group.WORLD, HERE)
    assert own is not None
    check(own)


def make_others_after(rank: int, world_size: int) -> None:
    """The caller's own have one name on all ranks."""
    group = dist.new_group([0, 1], timeout=LIMIT)
    if rank < 2:
        check(group_of_its_own(group, HERE) or group)
    check(dist.new_group(timeout=LIMIT))


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
@pytest.mark.parametrize("make", [make_some, make_alone, make_others_after])
@only_on_cpu("elsewhere pipelines use the group itself")
def test_ranks_with_other_numbers_of_groups_make_one(make, backend):
    run_ranks(make, 3, backend, timeout=60)
