"""Groups whose ranks are on several hosts."""

import pytest
import torch
import torch.distributed as dist

from support.hosts import INTERFACE, Hosts
from support.processes import run_ranks

HOST_OF_RANK = (0, 0, 1, 1)
GLOO = {"GLOO_SOCKET_IFNAME": INTERFACE}  # gloo looks up its own name, which no resolver knows


def _reduce(rank, world_size):
    sums = []
    for numel in (1, 1000, 1_000_000):
        tensor = torch.full((numel,), float(rank + 1))
        dist.all_reduce(tensor)
        sums.append(tensor.unique().tolist())
    return sums


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_ranks_on_two_hosts_reduce_with_no_settings_of_their_own(backend):
    env = GLOO if backend == "gloo" else {}
    with Hosts(2) as hosts:
        outcomes = run_ranks(_reduce, 4, backend, timeout=40, env=env, enter=hosts.enter(HOST_OF_RANK))
    assert outcomes == [[[10.0]] * 3] * 4
