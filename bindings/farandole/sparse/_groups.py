"""Process groups for threads that must not share one."""

from __future__ import annotations

import contextlib
import datetime
import weakref
from collections.abc import Iterator

import torch
import torch.distributed as dist

_twins: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = weakref.WeakKeyDictionary()
_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()  # so many for each
_given_up: list[dist.ProcessGroup] = []
_times_given_up = 0


def group_of_its_own(group: dist.ProcessGroup | None, device: torch.device) -> dist.ProcessGroup | None:
    """On CPU, where a thread may use it beside the forward, another group of the same ranks, made once for each group:
    a collective of it. Elsewhere, or alone, the group itself."""
    if group is None or group.size() == 1 or device.type != "cpu":
        return group
    if group not in _twins:
        while _given_up:
            dist.destroy_process_group(_given_up.pop())
        is_world = group is dist.group.WORLD
        _made[group] = number = _made.get(group, 0) + 1
        with _naming(f"{group.group_name}_farandole_sparse_{number}"):
            _twins[group] = dist.new_group(
                dist.get_process_group_ranks(group),
                backend=None if is_world else dist.get_backend(group),
                timeout=_timeout_of(group),
                use_local_synchronization=not is_world,
                group_desc="farandole_sparse",
            )
    return _twins[group]


def times_given_up() -> int:
    """As long as this is the same, so are the groups."""
    return _times_given_up


def forget_group_of_its_own(group: dist.ProcessGroup | None) -> None:
    """Its ranks have given it up, and all know: the next one is made anew."""
    global _times_given_up
    if group in _twins:
        _given_up.append(_twins.pop(group))
        _times_given_up += 1


# By its ranks and the number of groups of this process torch names a group that only its ranks make: ranks with other
# numbers of groups wait for each other under other names. And torch 2.15 counts it, so that the next group of all ranks
# has a name on these and another one on those.
@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Inside, a group that torch makes has this name, and none is counted."""
    torchs = dist.distributed_c10d
    before = torchs._process_group_name
    torchs._process_group_name = lambda ranks, use_hashed_name: name
    try:
        yield
    finally:
        torchs._process_group_name = before


def _timeout_of(group: dist.ProcessGroup) -> datetime.timedelta | None:
    try:
        return group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return None  # torch's default
