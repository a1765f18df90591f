"""PrefetchTrainPipelineSparseDist: caches take in a batch's rows between the forward and the backward before it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from farandole.sparse import EvalPipelineSparseDist, PrefetchTrainPipelineSparseDist
from farandole.sparse._caches import refuse_unlocked
from support.devices import DEVICE, ON_CPU
from support.processes import run_ranks
from support.recommenders import (
    ROWS,
    Recommender,
    ShardedTables,
    Trouble,
    assert_same,
    drain,
    drain_with_errors,
    is_exact,
    is_same,
    make_batches,
    on_device,
    plain_loop,
)


class CachedTables(ShardedTables):
    """Rows in use are in a cache, which pairs prefetches and forwards by their order, as fbgemm's does. A forward that
    finds none of its own takes another batch's, as there.
    """

    def __init__(self, seed: int, events: list[str]) -> None:
        super().__init__(seed)
        self.events = events
        self.queue: list[torch.Tensor] = []
        self.in_prefetch: Any = lambda: None

    def prefetch(self, ctx: dict[str, Any], dist_input: torch.Tensor, forward_stream: torch.Stream | None) -> None:
        assert (forward_stream is None) == ON_CPU and not torch.is_grad_enabled()
        self.in_prefetch()
        self.events.append("prefetch")
        self.queue.append(dist_input % ROWS)
        if forward_stream is not None:
            self.queue[-1].record_stream(forward_stream)

    def compute_and_output_dist(self, context: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
        locations = self.queue.pop(0) if self.queue else ids % ROWS
        return super().compute_and_output_dist(context, locations)


class Kernel(nn.Module):
    """Of fbgemm's, what is asked of it."""

    def __init__(self, rows: int, prefetch_pipeline: bool) -> None:
        super().__init__()
        self.lxu_cache_weights = torch.zeros(rows, 4)
        self.prefetch_pipeline = prefetch_pipeline


class CachedRecommender(Recommender):
    def __init__(self, seed: int, tables: int = 1) -> None:
        super().__init__(seed, tables)
        self.events: list[str] = []
        self.tables = nn.ModuleList(CachedTables(seed + i, self.events) for i in range(tables))
        self.dense.register_forward_hook(lambda *_: self.events.append("forward"))
        self.dense.register_full_backward_hook(lambda *_: self.events.append("backward"))


def made(kind: type[Recommender], seed: int, tables: int = 1) -> tuple[Any, torch.optim.Optimizer]:
    model = kind(seed, tables)
    # Adam makes whole steps of rounding errors.
    optimizer = torch.optim.Adam if is_exact() else torch.optim.SGD
    return model, optimizer(model.parameters(), lr=0.05)


def train_randomly(rank: int, world_size: int, seed: int, threads: bool | None) -> None:
    pick = random.Random(seed)
    for _ in range(3):
        number, grad_accum, tables = pick.randint(0, 9), pick.choice([None, 2, 3]), pick.randint(1, 3)
        case = pick.randint(0, 1 << 30)
        print(f"seed {seed}: {number} batches, grad_accum {grad_accum}, {tables} tables, case {case}")
        (model, optimizer), (plain, plain_optimizer) = (
            made(kind, case, tables) for kind in (CachedRecommender, Recommender)
        )
        pipeline = PrefetchTrainPipelineSparseDist(
            model, optimizer, DEVICE, grad_accum=grad_accum, load_on_thread=threads, strict=True
        )
        for epoch in range(2):
            batches = make_batches(case + epoch, number)
            expected = plain_loop(plain, plain_optimizer, batches, grad_accum or 1)
            model.events.clear()
            assert all(map(is_same, drain(pipeline, iter(batches)), expected))
            assert_same(model, plain)
            steps = ["forward", *["prefetch"] * tables, "backward"]
            last = ["forward", "backward"]
            ahead = ["prefetch"] * tables if number else []
            assert model.events == ahead + steps * max(0, number - 1) + (last if number else [])
        pipeline.detach()


@pytest.mark.sample(3)
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_trains_as_the_plain_loop_and_prefetches_before_each_backward(world_size, threads):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_ranks(train_randomly, world_size, "farandole", timeout=120, seed=seed, threads=threads)


def evaluate_between(rank: int, world_size: int) -> None:
    (model, optimizer), (plain, plain_optimizer) = made(CachedRecommender, 3), made(Recommender, 3)
    pipeline = PrefetchTrainPipelineSparseDist(model, optimizer, DEVICE)
    evaluation = EvalPipelineSparseDist(model, optimizer, DEVICE)
    batches, other = make_batches(1, 6), on_device(make_batches(2, 1)[0])
    iterator = iter(batches)
    outputs = [pipeline.progress(iterator) for _ in range(2)]
    for forward in (lambda: model(other), lambda: evaluation.progress(iter([other])), pipeline.reset, pipeline.detach):
        with pytest.raises(RuntimeError, match=r"tables\.0 holds rows.* for batch 2.*prefetch_ahead = False"):
            forward()
    pipeline.prefetch_ahead = False
    outputs.append(pipeline.progress(iterator))
    with torch.no_grad():
        between = [model(other)[1], evaluation.progress(iter([other]))]
    pipeline.prefetch_ahead = True
    outputs += drain(pipeline, iterator)
    expected = plain_loop(plain, plain_optimizer, batches[:3])
    with torch.no_grad():
        assert all(torch.equal(output, plain(other)[1]) for output in between)
    expected += plain_loop(plain, plain_optimizer, batches[3:])
    assert all(map(torch.equal, outputs, expected))
    assert_same(model, plain)


def test_no_other_forward_takes_what_was_prefetched():
    run_ranks(evaluate_between, 2, "farandole")


class Shift(nn.Module):
    """Runs ahead."""

    by = 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return ids + self.by + 7 * self.training


class Shifted(CachedRecommender):
    def __init__(self, seed: int, tables: int = 1) -> None:
        super().__init__(seed, tables)
        self.shift = Shift()
        self.register_buffer("offset", torch.zeros((), dtype=torch.int64, device=DEVICE))

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self.shift(batch.ids) + self.offset
        return self.score(torch.cat([self.tables[0](ids), batch.dense], 1), batch.labels)


def change_ahead(rank: int, world_size: int, what: str) -> None:
    """Rows for other ids than those of the forward are in the cache."""

    changes: dict[str, Callable[[Any], object]] = {
        "mode": lambda model: model.eval(),
        "attribute": lambda model: setattr(model.shift, "by", 1),
        "buffer": lambda model: model.offset.add_(1),
    }
    change = changes[what]

    for is_told in (False, True):
        (model, optimizer), (plain, plain_optimizer) = made(Shifted, 3), made(Shifted, 3)
        pipeline = PrefetchTrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
        batches = make_batches(1, 5)
        iterator = iter(batches)
        outputs = [pipeline.progress(iterator)]
        pipeline.prefetch_ahead = not is_told
        outputs.append(pipeline.progress(iterator))
        assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, batches[:2])))
        change(model), change(plain)
        if not is_told:
            name = "offset" if what == "buffer" else "shift"
            match = rf"^a change of '{name}', or of the mode, before the forward of batch 2, while tables\.0 holds rows"
            with pytest.raises(RuntimeError, match=match):
                pipeline.progress(iterator)
            continue
        pipeline.prefetch_ahead = True
        if what == "mode":
            with torch.no_grad():
                expected = [plain(on_device(batch))[1] for batch in batches[2:]]
        else:
            expected = plain_loop(plain, plain_optimizer, batches[2:])
        outputs = drain(pipeline, iterator)
        assert len(outputs) == 3 and all(map(torch.equal, outputs, expected))
        assert_same(model, plain)


@pytest.mark.parametrize("what", ["mode", "attribute", "buffer"])
def test_what_was_prefetched_is_not_taken_for_other_ids(what):
    run_ranks(change_ahead, 2, "farandole", what=what)


def fail(rank: int, world_size: int) -> None:
    (model, optimizer), (plain, plain_optimizer) = made(CachedRecommender, 3), made(Recommender, 3)
    calls = iter(range(100))

    def fail_at_third() -> None:
        if next(calls) == 2:
            raise Trouble("cannot prefetch")

    table: Any = model.tables[0]
    table.in_prefetch = fail_at_third
    pipeline = PrefetchTrainPipelineSparseDist(model, optimizer, DEVICE)
    batches = make_batches(1, 4)
    seen = drain_with_errors(pipeline, iter(batches))
    # Batch 2 fails in its turn; nobody knows then what its cache holds.
    plain_loop(plain, plain_optimizer, batches[:2])
    assert_same(model, plain)
    assert isinstance(seen[2], Trouble)
    assert isinstance(seen[3], RuntimeError) and "make the caches anew and call drop_prefetched()" in str(seen[3])
    with pytest.raises(RuntimeError, match=r"reset\(\) while tables\.0 holds rows"):
        pipeline.reset()
    table.queue.clear()
    pipeline.drop_prefetched()
    pipeline.reset()
    assert all(map(torch.equal, drain(pipeline, iter(batches)), plain_loop(plain, plain_optimizer, batches)))
    assert_same(model, plain)


def test_a_prefetch_that_fails_is_the_error_of_its_batch():
    run_ranks(fail, 2, "farandole")


def explain(rank: int, world_size: int) -> None:
    model, optimizer = made(CachedRecommender, 3, tables=2)
    pipeline = PrefetchTrainPipelineSparseDist(model, optimizer, DEVICE)
    assert pipeline.explain().splitlines()[-1] == "prefetched: tables.0, tables.1"
    with pytest.raises(ValueError, match="dist_on_thread=True: expected None or False"):
        PrefetchTrainPipelineSparseDist(model, optimizer, DEVICE, dist_on_thread=True)
    plain, plain_optimizer = made(Recommender, 3)
    with pytest.warns(UserWarning, match="no sharded module has a cache"):
        told = PrefetchTrainPipelineSparseDist(plain, plain_optimizer, DEVICE).explain()
    assert told.splitlines()[-1].startswith("prefetched: none")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_hooks = PrefetchTrainPipelineSparseDist(*made(CachedRecommender, 4), DEVICE, tracing="hooks")
        drain(by_hooks, iter(make_batches(1, 4)))
    assert by_hooks.explain().splitlines()[-1] == "prefetched: tables.0"


def test_says_what_is_prefetched():
    run_ranks(explain, 2, "farandole")


def test_refuses_a_cache_that_may_evict_rows_in_use():
    refuse_unlocked("tables", nn.Sequential(Kernel(0, False), Kernel(8, True), nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"^tables: prefetch_pipeline=False in a Kernel: expected True"):
        refuse_unlocked("tables", nn.Sequential(Kernel(8, True), Kernel(8, False)))


def refuse(rank: int, world_size: int) -> None:
    model, optimizer = made(CachedRecommender, 3)
    model.tables[0].kernel = Kernel(8, False)
    pipeline = PrefetchTrainPipelineSparseDist(model, optimizer, DEVICE)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"tables\.0: prefetch_pipeline=False"):
            pipeline.progress(iter(make_batches(1, 2)))
        assert "forward" not in vars(model.tables[0])


def test_refuses_it_at_each_attempt():
    run_ranks(refuse, 2, "farandole")
