"""Collectives that move data of sizes that differ from rank to rank, in several groups at once."""

import random

import pytest
import torch
import torch.distributed as dist

from support.devices import ON_CPU, only_on_cpu
from support.processes import run_ranks

# As processes read each other's memory, and where they may not.
WAYS = {"read": {}, "not read": {"FARANDOLE_SHM_SINGLE_COPY": "off"}}
EACH_WAY = ["read", pytest.param("not read", marks=only_on_cpu("memory that is read is the CPU's"))]
KINDS = ["all_to_all_single", "all_to_all", "all_gather", "gather", "scatter"]
# Around 8 KiB, 64 KiB and 512 KiB, where data goes another way.
SIZES = [0, 1, 63, 2047, 2048, 2049, 16_383, 16_384, 16_385, 40_000, 131_072, 200_001]


def _piece(seed, source, target, numel):
    return torch.full((numel,), float(seed % 1000 * 100 + source * 10 + target)) + torch.arange(numel) % 7


class Exchange:
    """One collective of a group, drawn alike by all of its ranks."""

    def __init__(self, seed, group, me):
        rng = random.Random(seed)
        self.seed = seed
        self.group = group
        self.ranks = dist.get_process_group_ranks(group)
        self.me = self.ranks.index(me)
        self.kind = rng.choice(KINDS)
        self.root = rng.randrange(len(self.ranks))
        size = len(self.ranks)
        self.sizes = [[rng.choice(SIZES) for _ in range(size)] for _ in range(size)]
        self.same = rng.choice(SIZES)  # for those that c10d wants to be even

    def __str__(self):
        return f"seed {self.seed}: {self.kind} of ranks {self.ranks}, root {self.root}, {self.sizes}, {self.same}"

    def start(self):
        me, size = self.me, len(self.ranks)
        uneven = self.kind.startswith("all_to_all")
        gives = [_piece(self.seed, me, r, self.sizes[me][r] if uneven else self.same) for r in range(size)]
        takes = [_piece(self.seed, r, me, self.sizes[r][me] if uneven else self.same) for r in range(size)]
        into = [torch.full_like(x, -1.0) for x in takes]
        options = {"group": self.group, "async_op": True}
        self.inputs, self.outputs, self.expected = gives, into, takes
        if self.kind == "all_to_all_single":
            self.inputs, self.outputs, self.expected = [torch.cat(gives)], [torch.cat(into)], [torch.cat(takes)]
            splits = [len(x) for x in takes], [len(x) for x in gives]
            self.work = dist.all_to_all_single(self.outputs[0], self.inputs[0], *splits, **options)
        elif self.kind == "all_to_all":
            self.work = dist.all_to_all(into, gives, **options)
        elif self.kind == "scatter":
            self.outputs, self.expected = [into[0]], [takes[self.root]]
            self.work = dist.scatter(into[0], gives if me == self.root else None, group_src=self.root, **options)
        else:
            self.inputs = [gives[0]]
            self.expected = [_piece(self.seed, r, 0, self.same) for r in range(size)]
            if self.kind == "all_gather":
                self.work = dist.all_gather(into, gives[0], **options)
            else:
                self.work = dist.gather(gives[0], into if me == self.root else None, group_dst=self.root, **options)
                if me != self.root:
                    self.expected = self.outputs

    def finish(self):
        self.work.wait()
        for x in self.inputs:  # it is this rank's again: nobody may read it any more
            x.fill_(-2.0)
        for x, y in zip(self.outputs, self.expected, strict=True):
            assert torch.equal(x, y), f"{self}: {x[:4]} against {y[:4]}"


def _in_all_groups(rank, world_size, first_seed, rounds):
    pairs = [[a, b] for a in range(world_size) for b in range(a)]
    groups = [dist.group.WORLD, dist.new_group(), *(dist.new_group(pair) for pair in pairs)]
    mine = [i for i, group in enumerate(groups) if group is not dist.GroupMember.NON_GROUP_MEMBER]
    for number in range(rounds):
        exchanges = {}
        for index in mine:
            seed = first_seed + 100 * number + index
            exchanges[index] = [Exchange(seed * 7 + i, groups[index], rank) for i in range(3)]
        order = [index for index in range(len(groups)) for _ in range(3)]
        # Another one on each rank, but for NCCL, which wants its groups used in one.
        rng = random.Random(first_seed + 1000 * number + (rank if ON_CPU else 0))
        rng.shuffle(order)
        started = [exchanges[index].pop(0) for index in order if index in exchanges]
        for exchange in started:
            exchange.start()
        rng.shuffle(started)
        for exchange in started:
            exchange.finish()
    return True


@pytest.mark.parametrize("way", EACH_WAY)
@pytest.mark.parametrize("world_size", [2, 3])
def test_exchanges_in_several_groups_at_once_do_not_disturb_each_other(world_size, way):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    arguments = {"first_seed": seed, "rounds": 30 if ON_CPU and way == "read" else 10}
    assert all(run_ranks(_in_all_groups, world_size, "farandole", timeout=120, env=WAYS[way], **arguments))


def _mismatched(rank, world_size, sent, wanted):
    dist.all_to_all_single(torch.zeros(2), torch.zeros(2))
    gives = torch.zeros(sent if rank == 0 else 4)
    takes = torch.zeros(wanted if rank == 1 else 4)
    try:
        dist.all_to_all_single(
            takes, gives, [len(takes), 0] if rank == 1 else [0, 4], [0, sent] if rank == 0 else [4, 0]
        )
    except ValueError as error:
        return "ValueError", str(error)
    except dist.DistBackendError as error:
        return "DistBackendError", str(error)
    return None


@only_on_cpu("NCCL does not compare sizes")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("sent", "wanted"), [(4, 5), (5000, 0), (5000, 5001), (300_000, 4), (300_000, 300_001)])
def test_splits_that_do_not_fit_together_are_an_error_that_names_both_sizes(sent, wanted, way):
    sender, receiver = run_ranks(_mismatched, 2, "farandole", env=WAYS[way], sent=sent, wanted=wanted)
    kind, message = receiver
    assert kind == "ValueError" and "rank 0 (host " in message
    assert f"sent {4 * sent} bytes, the buffer here has {4 * wanted}" in message
    if 4 * sent > 64 << 10:  # what is small is out of the sender's hands by then
        assert sender is not None
    if sender is not None:
        assert f"{4 * sent} bytes" in sender[1] and f"{4 * wanted}" in sender[1]
