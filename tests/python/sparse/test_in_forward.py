"""Batches that no longer go ahead, since what their inputs are computed with changes before each forward."""

from __future__ import annotations

import random
import warnings
from typing import Any

import pytest
import torch

from farandole.sparse import EvalPipelineSparseDist, TrainPipelineSparseDist
from farandole.sparse._in_forward import InForward
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import ROWS, Batch, Recommender, assert_same, made, make_batches, on_device, plain_loop


class Remap(torch.nn.Module):
    """Runs ahead; where it counts, by how many batches came before."""

    def __init__(self, counts: bool) -> None:
        super().__init__()
        self.counts, self.calls, self.salt, self.unused = counts, 0, 0, 0

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += self.counts
        return (ids + self.salt + self.calls) % ROWS


class Model(Recommender):
    def __init__(self, counts: bool | None = None) -> None:
        super().__init__(1)
        self.remap = None if counts is None else Remap(counts)
        self.register_buffer("offset", torch.zeros((), dtype=torch.int64, device=DEVICE))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        ids = batch.ids + self.offset
        rows = self.tables[0](ids if self.remap is None else self.remap(ids))
        return self.score(torch.cat([rows, batch.dense], 1), batch.labels)


def test_batches_stay_in_their_forward_after_three_in_a_row_and_ever_longer():
    policy = InForward()
    pauses = []
    for _ in range(2):
        assert not policy.was_exchanged_again()
    policy.was_right()
    for _ in range(2):
        assert not policy.was_exchanged_again() and policy.left == 0
    for _ in range(7):
        assert policy.was_exchanged_again()
        pauses.append(policy.left)
    assert pauses == [16, 32, 64, 128, 256, 256, 256]
    policy.was_right()
    assert [policy.was_exchanged_again() for _ in range(3)] == [False, False, True] and policy.left == 16


def change_each(rank: int, world_size: int, until: int, threads: bool) -> None:
    """Before each step until that batch."""
    (model, optimizer), (plain, plain_optimizer) = made(Model()), made(Model())
    outputs, expected, batches = [], [], make_batches(1, 48)
    iterator = iter(batches)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline = TrainPipelineSparseDist(
            model, optimizer, DEVICE, strict=True, load_on_thread=threads, dist_on_thread=threads
        )
        for number, batch in enumerate(batches):
            if number < until:
                for each in (model, plain):
                    each.module.offset.fill_(number)
            outputs.append(pipeline.progress(iterator))
            expected += plain_loop(plain, plain_optimizer, [batch])
    assert all(map(torch.equal, outputs, expected))
    assert_same(model, plain)
    why = "since 'offset' was changed after inputs had been computed with it"
    # 1, 2 and 3 go ahead; 20, 37 and so on look whether it is over.
    again, once = (4, 43) if until == 48 else (3, 16)
    assert model.module.tables[0].input_dists == 48 + again
    assert pipeline.explain().splitlines() == [
        "tables.0: pipelined",
        f"{again} batches have exchanged inputs again, in the forward, {why}",
        f"{once} batches have exchanged inputs once, in the forward, {why}, several times in a row",
    ]
    told = [each for each in caught if "exchange" in str(each.message)]
    assert [each.filename for each in told] == [__file__] * 2
    assert str(told[0].message).startswith(f"batch 1 exchanges its inputs again, in its forward, {why}: ")
    assert str(told[1].message).startswith(
        f"batches after 3 exchange their inputs once, in the forward, {why}, several"
    )


@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("until", [48, 20])
def test_what_changes_before_each_step_is_exchanged_once(until, threads):
    run_ranks(change_each, 2, "farandole", until=until, threads=threads)


def test_so_it_is_on_a_single_rank():
    run_ranks(change_each, 1, "farandole", until=48, threads=False)


def change_a_module(rank: int, world_size: int, counts: bool, ranks: tuple[int, ...]) -> None:
    """What is changed gives other inputs on these ranks."""
    (model, optimizer), (plain, plain_optimizer) = made(Model(counts)), made(Model(counts))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
    batches = make_batches(1, 30)
    iterator = iter(batches)
    for number, batch in enumerate(batches):
        for each in (model, plain):
            setattr(each.module.remap, "salt" if rank in ranks else "unused", number)
        assert torch.equal(pipeline.progress(iterator), plain_loop(plain, plain_optimizer, [batch])[0]), number
    assert_same(model, plain)
    assert model.module.remap.calls == plain.module.remap.calls
    assert model.module.tables[0].input_dists == 30 + 4
    assert "25 batches have exchanged inputs once, in the forward, since 'remap' was changed" in pipeline.explain()


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@pytest.mark.parametrize("counts", [False, True])
def test_so_it_is_with_a_module_that_runs_ahead(counts, ranks):
    run_ranks(change_a_module, 2, "farandole", counts=counts, ranks=ranks)


def end_unevenly(rank: int, world_size: int, seed: int, lengths: tuple[int, int]) -> None:
    """On one rank before the other, wherever that is; and again, with other iterators."""
    (model, optimizer), (plain, plain_optimizer) = made(Model()), made(Model())
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
    for epoch in range(3):
        batches = make_batches(seed + epoch, lengths[rank])
        iterator = iter(batches)
        for number in range(min(lengths) + 1):
            for each in (model, plain):
                each.module.offset.add_(number + 1)
            if number == min(lengths):
                with pytest.raises(StopIteration):
                    pipeline.progress(iterator)
            else:
                output = pipeline.progress(iterator)
                [expected] = plain_loop(plain, plain_optimizer, [batches[number]])
                assert torch.equal(output, expected), f"seed {seed}, epoch {epoch}, batch {number}"
    assert_same(model, plain)


@pytest.mark.parametrize("lengths", [(4, 5), (6, 4), (7, 9), (21, 20), (22, 30)])
def test_ranks_end_together(lengths):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    run_ranks(end_unevenly, 2, "farandole", seed=seed, lengths=lengths)


def fail_in_a_load(rank: int, world_size: int, at: int) -> None:
    """Such a batch is skipped on all ranks, whether it was to go ahead or not."""
    (model, optimizer), (plain, plain_optimizer) = made(Model()), made(Model())
    batches = make_batches(1, 30)

    def load() -> Any:
        for number, batch in enumerate(batches):
            yield batch if number != at or rank != 0 else object()

    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
    iterator = load()
    for number, batch in enumerate(batches):
        for each in (model, plain):
            each.module.offset.fill_(number)
        if number == at:
            with pytest.raises(TypeError if rank == 0 else RuntimeError):
                pipeline.progress(iterator)
            continue
        assert torch.equal(pipeline.progress(iterator), plain_loop(plain, plain_optimizer, [batch])[0]), number
    assert_same(model, plain)


@pytest.mark.parametrize("at", [3, 4, 5, 20, 21])
def test_a_batch_that_fails_is_skipped(at):
    run_ranks(fail_in_a_load, 2, "farandole", at=at)


def take_turns(rank: int, world_size: int) -> None:
    """Pipelines of one model, of which one is trained."""
    (model, optimizer), (plain, plain_optimizer) = made(Model()), made(Model())
    train = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
    evaluation = EvalPipelineSparseDist(model, optimizer, DEVICE, strict=True)
    batches, others = make_batches(1, 30), make_batches(2, 30)
    iterator, other_iterator = iter(batches), iter(others)
    for number, batch in enumerate(batches):
        for each in (model, plain):
            each.module.offset.fill_(number)
        assert torch.equal(train.progress(iterator), plain_loop(plain, plain_optimizer, [batch])[0]), number
        if number % 3 == 0:
            with torch.no_grad():
                expected = plain(on_device(others[number // 3]))[1]
            assert torch.equal(evaluation.progress(other_iterator), expected), number
    assert "once, in the forward" in train.explain()


def test_pipelines_of_one_model_take_turns():
    run_ranks(take_turns, 2, "farandole")
