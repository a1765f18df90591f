"""Groups whose ranks are on several hosts."""

import pathlib

import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.hosts import INTERFACE, Hosts
from support.processes import run_ranks

pytestmark = only_on_cpu("NCCL has one network where ranks share a GPU")

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


def _reduce_in_fresh_groups(rank, world_size, groups):
    wrong = []
    for group in range(groups):
        fresh = dist.new_group()
        for numel in (2**18 + 5, 2**22 + 5, 2**21 + 5):
            tensor = torch.arange(numel, dtype=torch.int64) * (rank + 1)
            dist.all_reduce(tensor, group=fresh)
            if not torch.equal(tensor, torch.arange(numel) * (world_size * (world_size + 1) // 2)):
                wrong.append((group, numel))
    return wrong


# Messages of several sizes, sent while those before them wait for room: over a network each takes its own way.
@pytest.mark.sample(3)
@pytest.mark.parametrize("host_of_rank", [(0, 1), HOST_OF_RANK])
@pytest.mark.parametrize("algorithm", ["direct", "ring", "rabenseifner"])
def test_messages_between_hosts_keep_their_order_in_the_first_calls_of_a_group(algorithm, host_of_rank):
    env = {"FARANDOLE_ALGORITHMS": f"all_reduce={algorithm}"}
    with Hosts(2) as hosts:
        enter = hosts.enter(host_of_rank)
        for _ in range(3):  # a process connects once
            assert not any(
                run_ranks(_reduce_in_fresh_groups, len(host_of_rank), "farandole", env=env, enter=enter, groups=2)
            )


def _listeners(rank, world_size):
    dist.all_reduce(torch.ones(1))
    tables = [pathlib.Path("/proc/net", name).read_text() for name in ("tcp", "tcp6")]
    return sum(line.split()[3] == "0A" for table in tables for line in table.splitlines()[1:])


def test_a_group_on_one_host_listens_nowhere():
    with Hosts(2) as hosts:
        assert run_ranks(_listeners, 2, "farandole", enter=hosts.enter((0, 0))) == [0, 0]
        assert min(run_ranks(_listeners, 2, "farandole", enter=hosts.enter((0, 1)))) > 0  # what is looked for is there
