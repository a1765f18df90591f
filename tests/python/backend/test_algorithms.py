"""The table of algorithms: what it says, what FARANDOLE_ALGORITHMS puts before it, and results that do not depend on it."""

import os
import random
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

import farandole
from support.devices import only_on_cpu
from support.processes import RankFailed, run_ranks
from support.rounds import run_rounds

pytestmark = only_on_cpu("the algorithms are the CPU's")

SECONDS = 3.0
ON_A_HOST = {
    "windows": "all_reduce=windows,reduce=windows,reduce_scatter=windows,all_gather=windows,all_to_all=windows",
    "slots": "all_reduce=slots,reduce=slots,reduce_scatter=slots,all_gather=slots,all_to_all=slots,broadcast=slots",
    "memory": "all_gather=memory,all_to_all=memory,gather=memory,scatter=memory",
    "messages": "all_gather=messages,all_to_all=messages,gather=messages,scatter=messages,broadcast=messages",
    "by size": "all_reduce:-100=windows,all_gather:8K-64K=memory,all_to_all:1K-9K=messages,gather:-70K=messages",
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("table", ON_A_HOST)
def test_random_operations_on_a_host_give_what_gloo_gives_whatever_is_set(table, ranks):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    env = {"FARANDOLE_ALGORITHMS": ON_A_HOST[table]}
    results = run_ranks(run_rounds, ranks, "farandole", timeout=90, env=env, first_seed=seed, seconds=SECONDS)
    assert results[0][0] >= 20 and all(result == results[0] for result in results)


@dataclass(frozen=True)
class OwnTable:
    table: str

    def __call__(self, rank: int) -> None:
        os.environ["FARANDOLE_HOST_ID"] = f"host {rank % 2}" if "ring" in self.table else "one"
        os.environ["FARANDOLE_ALGORITHMS"] = self.table if rank == 1 else ""


def _reduce(rank, world_size):
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize("table", ["all_reduce=ring", "all_reduce=slots"])
def test_ranks_with_different_settings_are_told(table):
    with pytest.raises(RankFailed, match=rf"FARANDOLE_ALGORITHMS is '({table})?' on rank [01], .*same on all ranks"):
        run_ranks(_reduce, 2, "farandole", timeout=20, enter=OwnTable(table))


def _tables(rank, world_size):
    return farandole.algorithms()


def test_the_table_can_be_read_and_overridden():
    env = {"FARANDOLE_ALGORITHMS": "all_reduce:64K-=ring,all_reduce:-16K=windows"}
    first, second, *rest = run_ranks(_tables, 2, "farandole", timeout=20, env=env)[0]
    assert "65536 bytes or more, any ranks, 2 hosts or more" in first and first.endswith("ring (FARANDOLE_ALGORITHMS)")
    assert "up to 16384 bytes, any ranks, 1 host" in second and second.endswith("windows (FARANDOLE_ALGORITHMS)")
    for operation in ("all_reduce", "reduce_scatter", "broadcast", "all_gather", "all_to_all", "gather", "scatter"):
        assert any(line.startswith(f"{operation}: ") and " 1 host, " in line for line in rest), operation
    assert any(line.startswith("barrier: ") for line in rest)


@dataclass(frozen=True)
class OwnReading:
    ways: tuple[str, str]

    def __call__(self, rank: int) -> None:
        os.environ["FARANDOLE_SHM_SINGLE_COPY"] = self.ways[rank]


@pytest.mark.parametrize(
    "ways", [("auto", "auto"), ("eager", "eager"), ("lazy", "lazy"), ("eager", "lazy"), ("off", "eager")]
)
def test_two_ranks_read_where_that_is_cheap_for_both(ways):
    """The same table on both, and the sizes around which data goes another way."""
    first, second = run_ranks(_swap_and_tell, 2, "farandole", timeout=60, enter=OwnReading(ways))
    assert first == second
    if "auto" not in ways:
        assert first == f"this group: reading is {'' if set(ways) == {'eager'} else 'not '}cheap"


def _swap_and_tell(rank, world_size):
    for numel in (1, 8191, 8192, 16384, 16385, 300_001, 3_000_000):
        mine, theirs = torch.arange(numel) + rank, torch.arange(numel) + 1 - rank
        whole = torch.zeros(2 * numel, dtype=torch.int64)
        dist.all_gather_into_tensor(whole, mine)
        assert torch.equal(whole[(1 - rank) * numel :][:numel], theirs)
        dist.all_to_all_single(whole, torch.cat([mine, -mine]))
        assert torch.equal(whole[(1 - rank) * numel :][:numel], theirs if rank == 0 else -theirs)
        for _ in range(3):
            whole.zero_()
            ops = [dist.P2POp(dist.isend, mine, 1 - rank), dist.P2POp(dist.irecv, whole[:numel], 1 - rank)]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            assert torch.equal(whole[:numel], theirs)
    return farandole.algorithms()[-1]


@pytest.mark.parametrize(
    ("entry", "expected"),
    [
        ("all_reduce=fast", "one of slots, windows .on one host., or one of flat, "),
        ("gather=windows", "one of memory, messages .on one host. for gather"),
        ("all_gather:4K=slots", "a range of bytes after ':'"),
    ],
)
def test_a_setting_that_cannot_be_understood_is_refused(entry, expected):
    with pytest.raises(RankFailed, match=f"FARANDOLE_ALGORITHMS is '{entry}'; expected {expected}"):
        run_ranks(_tables, 1, "farandole", timeout=20, env={"FARANDOLE_ALGORITHMS": entry})
