"""Collectives of groups whose ranks are on several hosts."""

import random

import pytest
import torch
import torch.distributed as dist

import farandole
from support.devices import only_on_cpu
from support.hosts import INTERFACE, Hosts, PretendHost
from support.processes import await_all, run_ranks
from support.rounds import run_rounds

pytestmark = only_on_cpu("NCCL has one network where ranks share a GPU")

SECONDS = 3.0
TWO_AND_TWO = (0, 1, 0, 1)
ONE_TWO_THREE = (0, 1, 2, 2, 1, 2)
ONE_EACH = (0, 1, 2)
TABLES = [
    "",
    "all_reduce=ring,reduce=direct,broadcast=chain,all_gather=ring,reduce_scatter=direct,barrier=dissemination",
    "all_reduce=hierarchical/rabenseifner,broadcast=hierarchical/chain,all_gather=hierarchical/ring",
    "all_reduce:-64K=recursive_doubling,all_reduce=hierarchical/direct",
]


@pytest.mark.sample(6)
@pytest.mark.timeout(180)
@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("hosts", [ONE_EACH, TWO_AND_TWO, ONE_TWO_THREE], ids=str)
def test_random_operations_give_what_gloo_gives(hosts, table):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    results = run_ranks(
        run_rounds, len(hosts), "farandole", timeout=90, env={"FARANDOLE_ALGORITHMS": table},
        enter=PretendHost(hosts), first_seed=seed, seconds=SECONDS,
    )  # fmt: skip
    assert results[0][0] >= 20 and all(result == results[0] for result in results)


def _reductions(rank, world_size):
    transports = farandole.transport_report()
    for dtype in (torch.int32, torch.uint8, torch.float32, torch.float64, torch.complex64):
        for numel in (1, 999, 300_001):
            parts = [torch.arange(numel).remainder(7).add(r).to(dtype) for r in range(world_size)]
            total = torch.stack(parts).sum(0).to(dtype)
            mean = (
                total.div(world_size, rounding_mode="trunc")
                if not dtype.is_floating_point and not (dtype.is_complex)
                else total / world_size
            )
            mine = parts[rank].clone()
            dist.all_reduce(mine, dist.ReduceOp.AVG)
            torch.testing.assert_close(mine, mean, rtol=1e-6, atol=0)
            mine = parts[rank].clone()
            dist.reduce(mine, 1, dist.ReduceOp.AVG)
            torch.testing.assert_close(mine, mean if rank == 1 else parts[rank], rtol=1e-6, atol=0)
            out = torch.empty(numel, dtype=dtype)
            dist.reduce_scatter(out, [part.clone() for part in parts], dist.ReduceOp.AVG)
            torch.testing.assert_close(out, parts[rank])
    noise = torch.randn(300_001, generator=torch.Generator().manual_seed(rank))
    dist.all_reduce(noise)
    return transports, noise.sum().item(), noise.view(torch.int32).sum().item()


@pytest.mark.parametrize("hosts", [TWO_AND_TWO, ONE_TWO_THREE], ids=str)
def test_averages_are_divided_once_and_sums_have_the_same_bits(hosts):
    results = run_ranks(_reductions, len(hosts), "farandole", timeout=60, enter=PretendHost(hosts))
    assert len({result[1:] for result in results}) == 1
    for rank, (transports, *_) in enumerate(results):
        for other, carrier in transports.items():
            if other == rank:
                continue
            # Between hosts nothing but a network, though here they could share memory.
            expected = "shm" if hosts[other] == hosts[rank] else "ucx: tcp"
            assert carrier.startswith(expected), (rank, other, carrier)


def _call_different_sizes(rank, world_size):
    with pytest.raises((ValueError, dist.DistBackendError)) as raised:
        dist.all_reduce(torch.ones(4 + rank // 2))
    await_all(rank, world_size)  # what the others learn is not that this one has left
    return str(raised.value)


def test_hosts_that_give_different_sizes_get_an_error():
    errors = run_ranks(_call_different_sizes, 4, "farandole", timeout=20, enter=PretendHost((0, 0, 1, 1)))
    # A leader of the two hosts sees it, and tells the others.
    sizes = ("sent 20 bytes, the buffer here has 16", "sent 16 bytes, the buffer here has 20")
    for error in errors:
        assert any(size in error for size in sizes), errors
        assert "rank 0" in error or "rank 2" in error, errors


def test_random_operations_between_network_namespaces():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    with Hosts(2) as hosts:
        results = run_ranks(
            run_rounds, 4, "farandole", timeout=60, env={"GLOO_SOCKET_IFNAME": INTERFACE},
            enter=hosts.enter((0, 0, 1, 1)), first_seed=seed, seconds=SECONDS,
        )  # fmt: skip
    assert results[0][0] >= 20 and all(result == results[0] for result in results)
