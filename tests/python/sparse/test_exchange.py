"""What ranks tell each other of a batch reaches all of them, whoever has it, has ended or has failed."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist

from farandole._C import Presence, ProfilerRange
from farandole.sparse._exchange import SplitsExchange
from farandole.sparse._exchange_group import ExchangeGroup
from support.devices import DEVICE, only_on_cpu
from support.processes import await_all, run_ranks

HERE = torch.device(DEVICE)
KINDS = [Presence.BATCH, Presence.BATCH, Presence.BATCH, Presence.END_OF_DATA, Presence.FAILED]


def tell(rank: int, world_size: int, seed: int) -> None:
    pick = random.Random(seed)  # the same on all ranks
    exchange = SplitsExchange(ExchangeGroup(dist.group.WORLD, HERE))
    exchange.expect(columns := pick.randint(0, 5))
    for number in range(40):
        kinds = [pick.choice(KINDS) for _ in range(world_size)]
        alone = pick.random() < 0.4  # an agreement between exchanges of splits
        width = 1 if alone else columns
        rows = [[[pick.randrange(-9, 1 << 60) for _ in range(width)] for _ in kinds] for _ in kinds]
        mine, reason = kinds[rank], f"{number} on {rank}"
        time.sleep(pick.choice([0, 0, 0.002 * rank]))
        if alone:
            places = [pick.randrange(-3, 4) for _ in kinds]
            rows = [[[place]] * world_size for place in places]
            said = exchange.agree(mine, reason, places[rank])
        else:
            exchange.post(mine, rows[rank] if mine == Presence.BATCH else None, reason)
            said = exchange.wait()
        assert exchange.columns == columns
        if Presence.END_OF_DATA in kinds:
            assert said.presence == Presence.END_OF_DATA and not said.failed
            continue
        failed = {other: f"{number} on {other}" for other, kind in enumerate(kinds) if kind == Presence.FAILED}
        assert said.presence == (Presence.FAILED if failed else Presence.BATCH)
        assert said.failed == failed
        for other, row in enumerate(said.rows):
            if alone or kinds[other] == Presence.BATCH:
                assert row == rows[other][rank]
            else:
                assert row == [0] * columns
    exchange.agree(Presence.BATCH)  # all have read the reasons
    store = dist.distributed_c10d._get_default_store()
    await_all(rank, world_size)
    assert not any(store.check([f"{exchange._name}/{number}/{rank}"]) for number in range(50)), "reasons are left"


@pytest.mark.parametrize("backend", ["farandole", "gloo"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_ranks_hear_who_has_a_batch_and_who_has_failed(world_size, backend):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_ranks(tell, world_size, backend, seed=seed)


def give_up(rank: int, world_size: int, seed: int) -> None:
    pick = random.Random(seed)
    culprit, number = pick.randrange(world_size), pick.randrange(5)
    group = ExchangeGroup(dist.new_group(), HERE)
    exchange = SplitsExchange(group)
    for _ in range(number):
        assert exchange.agree(Presence.BATCH).presence == Presence.BATCH
    if rank == culprit:
        time.sleep(0.3)  # the others wait
        assert group.give_up(ValueError("broken"), "stage").rank == rank
    else:
        began = time.monotonic()
        with pytest.raises(RuntimeError):
            exchange.agree(Presence.BATCH)
        assert time.monotonic() - began < 8
        assert group.has_failed
        given_up = group.given_up()
        assert given_up is not None and (given_up.rank, given_up.what) == (culprit, "stage: ValueError: broken")
    await_all(rank, world_size)


@only_on_cpu("for agree_on_inputs, which is for pipelines on CPU")
@pytest.mark.parametrize("backend", ["farandole", "gloo"])
def test_a_rank_that_gives_up_ends_the_agreement_of_the_others(backend):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_ranks(give_up, 3, backend, seed=seed)


def test_alone_a_rank_hears_itself():
    exchange = SplitsExchange(ExchangeGroup(None, HERE))
    assert exchange.agree(Presence.FAILED, "why", 3).rows == [[3]]
    exchange.post(Presence.BATCH, [[4, 5]])
    assert exchange.has_come() and exchange.wait().rows == [[4, 5]]


def test_ranges_are_those_of_torchs_profiler():
    with torch.profiler.profile() as profile:
        for kind in (ProfilerRange, torch.profiler.record_function):
            with pytest.raises(KeyError), kind("## a range ##"):
                torch.ones(2).add_(1)
                raise KeyError
    ours, theirs = [event for event in profile.events() if event.name == "## a range ##"]
    assert (ours.scope, ours.is_user_annotation) == (theirs.scope, theirs.is_user_annotation)
    assert [child.name for child in ours.cpu_children] == [child.name for child in theirs.cpu_children] != []
    with ProfilerRange("## nobody records ##"):
        pass
