"""Random operations, drawn alike by all ranks, over farandole and over gloo."""

import random
import time

import torch
import torch.distributed as dist

GLOO_DTYPES = [torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64]
OUR_DTYPES = [torch.int16, torch.bool, torch.bfloat16]
SIZES = [0, 1, 2, 3, 7, 31, 1000, 1023, 1024, 1025, 4095, 4096, 4097, 8191, 65_535, 65_537, 300_001]
REDUCE_OPS = [dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX]
KINDS = [
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_tensor", "gather", "scatter", "reduce_scatter",
    "all_to_all_single", "p2p", "batch", "any_source", "all_to_all",
]  # fmt: skip
MESSAGES = ["p2p", "batch", "any_source"]


def _data(seed, rank, numel, dtype):
    generator = torch.Generator().manual_seed(seed * 131 + rank)
    if dtype.is_floating_point:
        return torch.randn(numel, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 4, (numel,), generator=generator).to(dtype)


class Round:
    """One operation, drawn by every rank from the same seed; ``run`` does it on a group and gives what came out."""

    def __init__(self, seed, me, sizes_of_groups):
        rng = random.Random(seed)
        self.seed = seed
        self.shape = rng.randrange(len(sizes_of_groups))
        self.size = sizes_of_groups[self.shape]
        self.me = me
        self.kind = rng.choice(KINDS)
        self.dtype = rng.choice(GLOO_DTYPES + OUR_DTYPES)
        self.numel = rng.choice(SIZES)
        self.op = rng.choice(REDUCE_OPS)
        self.root = rng.randrange(self.size)
        self.tag = rng.choice([0, 1, 77, 2**31 - 1])
        self.is_async = rng.random() < 0.5
        self.rng_seed = rng.random()
        if self.dtype == torch.bool and self.op in (dist.ReduceOp.MIN, dist.ReduceOp.MAX):
            self.op = dist.ReduceOp.SUM

    def __str__(self):
        return (
            f"seed {self.seed}: {self.kind} of {self.numel} x {self.dtype}, {self.op}, root {self.root}, tag {self.tag},"
            f" {self.size} ranks (group {self.shape}), {'async' if self.is_async else 'sync'}"
        )

    @property
    def reduces(self):
        return self.kind in ("all_reduce", "reduce", "reduce_scatter")

    @property
    def gloo_can(self):
        if self.kind in MESSAGES and self.numel == 0:
            return False
        return self.kind != "all_to_all" and not (self.reduces and self.dtype in OUR_DTYPES)

    def part(self, rank, factor=1):
        return _data(self.seed, rank, self.numel * factor, self.dtype)

    def run(self, group, me):
        return self._run(group, me, lambda x: x)

    def run_on_gloo(self, group, me):
        """What gloo has no name for it can still move, as bytes."""
        if self.dtype in OUR_DTYPES:
            return [x.view(self.dtype) for x in self._run(group, me, lambda x: x.view(torch.uint8))]
        return self.run(group, me)

    def _run(self, group, me, view):
        def call(function, *args, **kwargs):
            work = function(*args, group=group, async_op=self.is_async, **kwargs)
            if self.is_async:
                work.wait()

        rng = random.Random(self.rng_seed)
        x = view(self.part(me))
        outputs = [torch.zeros_like(x) for _ in range(self.size)]
        if self.kind == "all_reduce":
            call(dist.all_reduce, x, self.op)
            return [x]
        if self.kind == "reduce":
            call(dist.reduce, x, op=self.op, group_dst=self.root)
            return [x] if me == self.root else []
        if self.kind == "broadcast":
            call(dist.broadcast, x, group_src=self.root)
            return [x]
        if self.kind == "all_gather":
            call(dist.all_gather, outputs, x)
            return outputs
        if self.kind == "all_gather_tensor":
            flat = torch.zeros(x.numel() * self.size, dtype=x.dtype)
            call(dist.all_gather_into_tensor, flat, x)
            return [flat]
        if self.kind == "gather":
            call(dist.gather, x, outputs if me == self.root else None, group_dst=self.root)
            return outputs if me == self.root else []
        if self.kind == "scatter":
            parts = [view(self.part(10 + r)) for r in range(self.size)] if me == self.root else None
            call(dist.scatter, outputs[0], parts, group_src=self.root)
            return outputs[:1]
        if self.kind == "reduce_scatter":
            call(dist.reduce_scatter, outputs[0], list(self.part(me, self.size).view(self.size, -1).unbind()), self.op)
            return outputs[:1]
        sizes = [[rng.choice([0, 1, 5, 900, 5000, 40_000]) for _ in range(self.size)] for _ in range(self.size)]
        if self.kind == "all_to_all_single":
            sent = view(_data(self.seed, me, sum(sizes[me]), self.dtype))
            unit = self.dtype.itemsize // x.dtype.itemsize
            gives = [n * unit for n in sizes[me]]
            takes = [sizes[r][me] * unit for r in range(self.size)]
            received = torch.zeros(sum(takes), dtype=x.dtype)
            call(dist.all_to_all_single, received, sent, takes, gives)
            return [received]
        if self.kind == "all_to_all":
            call(dist.all_to_all, outputs, [self.part(10 * me + r) for r in range(self.size)])
            return outputs
        return self._exchange(group, me, view)

    def _pairs(self):
        rng = random.Random(self.rng_seed)
        pairs = [(rng.randrange(self.size), rng.randrange(self.size)) for _ in range(rng.randrange(1, 6))]
        return [(a, b) for a, b in pairs if a != b]

    def _exchange(self, group, me, view):
        """Messages between random pairs; each rank posts its sends first."""
        pairs = self._pairs()
        into = [view(torch.zeros(self.numel, dtype=self.dtype)) for a, b in pairs if b == me]
        sources = [a for a, b in pairs if b == me]
        sends = [(view(self.part(100 + i)), b) for i, (a, b) in enumerate(pairs) if a == me]
        if self.kind == "batch":
            ops = [dist.P2POp(dist.isend, x, group=group, group_peer=b) for x, b in sends]
            ops += [dist.P2POp(dist.irecv, x, group=group, group_peer=a) for x, a in zip(into, sources)]
            for work in dist.batch_isend_irecv(ops) if ops else []:
                work.wait()
            return into
        # A message of the next round must not be taken for one of this.
        tag = 100 + self.seed % 1_000_000 if self.kind == "any_source" else self.tag
        works = [dist.isend(x, group=group, tag=tag, group_dst=b) for x, b in sends]
        if self.kind == "any_source":
            # From whom the next one comes is open: sort by where it came from.
            came = [(dist.recv(x, group=group, tag=tag), x) for x in into]
            into = [x for _, x in sorted(came, key=lambda pair: pair[0])]
        else:
            for x, a in zip(into, sources):
                dist.recv(x, group=group, tag=tag, group_src=a)
        for work in works:
            work.wait()
        return into

    def expected(self, me):
        """For what gloo cannot do."""
        if self.kind == "all_to_all":
            return [self.part(10 * r + me) for r in range(self.size)]
        if self.kind in MESSAGES:
            return [self.part(100 + i) for i, (_, b) in enumerate(self._pairs()) if b == me]
        factor = self.size if self.kind == "reduce_scatter" else 1
        parts = [self.part(r, factor) for r in range(self.size)]
        if self.kind == "reduce_scatter":
            parts = [p.view(self.size, -1)[me] for p in parts]
        wide = [p.float() if self.dtype == torch.bfloat16 else p.long() for p in parts]
        functions = {REDUCE_OPS[0]: torch.add, REDUCE_OPS[1]: torch.mul, REDUCE_OPS[2]: torch.minimum}
        result = wide[0]
        for part in wide[1:]:
            result = functions.get(self.op, torch.maximum)(result, part)
        return [] if self.kind == "reduce" and me != self.root else [result.to(self.dtype)]

    def compare(self, ours, theirs):
        assert len(ours) == len(theirs), str(self)
        for mine, other in zip(ours, theirs):
            if self.reduces and self.dtype.is_floating_point and (self.size > 2 or self.dtype == torch.float16):
                rough = {torch.float16: 2e-2, torch.bfloat16: 3e-2, torch.float32: 1e-4}.get(self.dtype, 1e-9)
                torch.testing.assert_close(mine, other, rtol=rough, atol=rough, msg=lambda m: f"{self}: {m}")
            else:
                assert torch.equal(mine, other), f"{self}: {mine[:4]} against {other[:4]}"


def _shapes(world_size):
    """All of them, then all but one, in another order."""
    return [list(range(world_size))] + ([list(range(world_size))[:0:-1]] if world_size > 2 else [])


def run_rounds(rank, world_size, first_seed, seconds):
    groups = []
    for ranks in _shapes(world_size):
        pair = [dist.new_group(ranks, backend=name) for name in ("farandole", "gloo")]
        groups.append((sorted(ranks), *pair))
    sizes = [len(ranks) for ranks, *_ in groups]
    kinds, seed, end = set(), first_seed, time.monotonic() + seconds
    while True:
        if (seed - first_seed) % 20 == 0:  # all stop at the same round
            stop = torch.tensor([time.monotonic() > end], dtype=torch.int32)
            dist.all_reduce(stop, dist.ReduceOp.MAX)
            if stop.item():
                return seed - first_seed, sorted(kinds)
        draw = Round(seed, rank, sizes)
        ranks, ours, gloo = groups[draw.shape]
        if rank in ranks:
            me = ranks.index(rank)
            try:
                result = draw.run(ours, me)
                draw.compare(result, draw.run_on_gloo(gloo, me) if draw.gloo_can else draw.expected(me))
            except Exception as error:
                raise AssertionError(f"{draw}: {error}") from error
        kinds.add(draw.kind)
        seed += 1
