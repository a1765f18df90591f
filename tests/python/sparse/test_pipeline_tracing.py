"""Pipelines over models that fx cannot trace, and over models of which not everything can go ahead."""

from __future__ import annotations

import random
import warnings

import pytest
import torch

from farandole.sparse import CannotTrace, TrainPipelineSparseDist
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import (
    Batch,
    Recommender,
    ShardedTables,
    assert_same,
    drain,
    make_batches,
    on_device,
    plain_loop,
    wrapped,
)


class Untraceable(Recommender):
    """Asks for values, and calls its second table where the batch is large."""

    def __init__(self, seed: int, is_fickle: bool = False) -> None:
        super().__init__(seed, tables=2)
        self.is_fickle = is_fickle

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        scale = 2.0 if float(batch.dense.sum()) > 0 else 1.0
        ids = batch.ids.clone() if self.is_fickle and batch.ids.shape[1] == 5 else batch.ids
        rows = [self.tables[0](batch.ids), self.tables[1](ids, offset=3)]
        return self.score(torch.cat([*rows, scale * batch.dense], 1), batch.labels)


def find_by_hooks(rank: int, world_size: int, threads: bool, tracing: str | None) -> None:
    model, plain = wrapped(Untraceable(1)), wrapped(Untraceable(1))
    optimizer, plain_optimizer = (torch.optim.Adam(each.parameters(), lr=0.05) for each in (model, plain))
    options = {"load_on_thread": threads, "dist_on_thread": threads}
    with pytest.raises(CannotTrace, match=r"float\(batch\.dense\.sum\(\)\)"):
        TrainPipelineSparseDist(model, optimizer, DEVICE, tracing="fx").explain()
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True, tracing=tracing, **options)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        first, *untraced = pipeline.explain().splitlines()
    assert first == "the forward of the first batch will tell"
    assert ("float(batch.dense.sum())" in "".join(untraced)) == (tracing is None)
    assert any("found by hooks" in str(warning.message) for warning in seen) == (tracing is None)
    batches = make_batches(3, 7)
    outputs = drain(pipeline, iter(batches))
    assert pipeline.explain() == "tables.0: pipelined\ntables.1: pipelined"
    assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, batches)))
    assert_same(model, plain)


@pytest.mark.sample(2)
@pytest.mark.parametrize("tracing", [None, "hooks"])
@pytest.mark.parametrize("threads", [False, True])
def test_finds_inputs_in_the_first_forward_where_fx_cannot_trace(threads, tracing):
    run_ranks(find_by_hooks, 2, "farandole", threads=threads, tracing=tracing)


def change_inputs(rank: int, world_size: int) -> None:
    model = wrapped(Untraceable(1, is_fickle=True))
    pipeline = TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), lr=0.1), DEVICE, tracing="hooks")
    alike = make_batches(3, 4, sizes=(4, 5))
    other = make_batches(4, 1, sizes=(5, 6))
    iterator = iter([*alike, *other, *alike])
    for _ in alike:
        pipeline.progress(iterator)
    with pytest.raises(RuntimeError, match=r"tables\.1 is called with other inputs"):
        pipeline.progress(iterator)
    assert len(drain(pipeline, iterator)) == 4


def test_refuses_a_forward_that_departs_from_what_hooks_have_seen():
    run_ranks(change_inputs, 2, "farandole")


class Dependent(Recommender):
    """Its second table's input comes out of the dense part."""

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.tables[0](batch.ids)
        weight = self.dense[0].weight.detach().abs().sum().long() * 0
        second = self.tables[1](batch.ids + weight)
        return self.score(torch.cat([first, second, batch.dense], 1), batch.labels)


def leave_one(rank: int, world_size: int) -> None:
    model, plain = wrapped(Dependent(1, tables=2)), wrapped(Dependent(1, tables=2))
    optimizer, plain_optimizer = (torch.optim.Adam(each.parameters(), lr=0.05) for each in (model, plain))
    with pytest.raises(ValueError, match=r"cannot be pipelined\ntables\.1: not pipelined: .*weight"):
        TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True).explain()
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    with pytest.warns(UserWarning, match=r"exchange their inputs in the forward\ntables\.1: not pipelined"):
        text = pipeline.explain()
    assert text.splitlines()[0] == "tables.0: pipelined"
    batches = make_batches(3, 5)
    assert all(map(torch.equal, drain(pipeline, iter(batches)), plain_loop(plain, plain_optimizer, batches)))
    assert_same(model, plain)
    with pytest.raises(ValueError, match="Dependent has another pipeline, with another process_group"):
        TrainPipelineSparseDist(model, optimizer, DEVICE, tracing="hooks").explain()
    with pytest.raises(ValueError, match="tracing='jit'"):
        TrainPipelineSparseDist(model, optimizer, DEVICE, tracing="jit")


def test_says_what_prevents_a_module_and_goes_on_without_it():
    run_ranks(leave_one, 2, "farandole")


class Computed(Untraceable):
    """Not for fx; and its second table's input is no part of the batch."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, is_fickle=True)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        assert batch.ids.shape[1] == 5
        return super().forward(batch)


def refuse_for_good(rank: int, world_size: int) -> None:
    model = wrapped(Computed(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(make_batches(3, 9, sizes=(5, 6)))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
    with pytest.warns(UserWarning, match="found by hooks"):
        told = pipeline.explain().splitlines()
    assert told[0] == "the forward of the first batch will tell"
    assert told[1].startswith("by hooks, since torch.fx cannot trace the model"), told
    pipeline.progress(batches)
    for _ in range(3):
        with pytest.raises(ValueError, match=r"tables\.1: not pipelined: .*no part of the batch"):
            pipeline.progress(batches)
    pipeline.attach()
    pipeline.progress(batches)  # whose hooks find it again
    with pytest.raises(ValueError, match=r"tables\.1: not pipelined"):
        pipeline.progress(batches)
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    drain(pipeline, batches)
    told = pipeline.explain()
    assert told.startswith("tables.0: pipelined\ntables.1: not pipelined") and "by hooks, since torch.fx cannot" in told


def test_what_hooks_have_refused_is_refused_for_good():
    run_ranks(refuse_for_good, 2, "farandole")


class AllAtOnce(torch.nn.Module):
    """A sharded module that is called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = ShardedTables(1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self.table(batch.ids) + self.table(batch.ids, offset=1)
        return rows.sum(1), rows.detach()


def call_twice(rank: int, world_size: int) -> None:
    model = AllAtOnce()
    pipeline = TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), lr=0.1), DEVICE)
    with pytest.warns(UserWarning, match="one forward calls it 2 times"):
        outputs = drain(pipeline, iter(make_batches(1, 3)))
    assert len(outputs) == 3


def test_a_module_that_is_called_twice_stays_in_the_forward():
    run_ranks(call_twice, 2, "farandole")


class Deceived(Recommender):
    """fx takes a part of the batch for something; it is None."""

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        ids = batch.ids if batch.labels is None else batch.ids + 1
        with_offset = ids if getattr(batch, "offsets", None) is None else ids + 2
        rows = self.tables[0](with_offset)
        return self.score(torch.cat([rows, batch.dense], 1), batch.labels)


def deceive(rank: int, world_size: int) -> None:
    model = wrapped(Deceived(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in (batches := make_batches(3, 3)):
        batch.offsets = None
    with pytest.raises(RuntimeError, match=r"tables\.0 is called with other inputs .* whether it is None"):
        TrainPipelineSparseDist(model, optimizer, DEVICE).progress(iter(batches))


def test_says_so_where_fx_was_deceived():
    run_ranks(deceive, 2, "farandole")


class Mixed(Recommender):
    """Ids go through a module that counts its calls, and notes their modes, before they are looked up."""

    class Shift(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
            self.modes: list[bool] = []

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.modes.append(self.training)
            return ids + self.calls + 7 * self.training

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.shift = self.Shift()

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self.shift(batch.ids)
        features = torch.cat([self.tables[0](ids), batch.dense + ids.sum(0).unsqueeze(1)], 1)
        return self.score(features, batch.labels)


def process_once(rank: int, world_size: int, threads: bool) -> None:
    model, plain = wrapped(Mixed(1)), wrapped(Mixed(1))
    optimizer, plain_optimizer = (torch.optim.Adam(each.parameters(), lr=0.05) for each in (model, plain))
    pipeline = TrainPipelineSparseDist(
        model, optimizer, DEVICE, strict=True, load_on_thread=threads, dist_on_thread=threads
    )
    batches = make_batches(3, 6)
    assert all(map(torch.equal, drain(pipeline, iter(batches)), plain_loop(plain, plain_optimizer, batches)))
    assert_same(model, plain)
    assert int(model.module.shift.calls) == 6


@pytest.mark.parametrize("threads", [False, True])
def test_runs_what_comes_before_a_table_once_for_each_batch(threads):
    run_ranks(process_once, 2, "farandole", threads=threads)


def switch_modes(rank: int, world_size: int, seed: int, threads: bool) -> None:
    """Of a batch that has come ahead in another mode nothing is left but what its own forward would do."""
    pick = random.Random(seed)
    model, plain = wrapped(Mixed(1)), wrapped(Mixed(1))
    optimizer, plain_optimizer = (torch.optim.Adam(each.parameters(), lr=0.05) for each in (model, plain))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True, load_on_thread=threads)
    batches = make_batches(3, 12)
    iterator = iter(batches)
    for number, batch in enumerate(batches):
        is_training = pick.random() < 0.5
        how = pick.choice(["stay", "stay", "detach", "attach"])
        print(f"seed {seed}, batch {number}: training {is_training}, {how}")
        model.train(is_training), plain.train(is_training)
        if how != "stay":
            pipeline.detach()
        if how == "attach":
            pipeline.attach(model)
        output = pipeline.progress(iterator)
        if is_training:
            [expected] = plain_loop(plain, plain_optimizer, [batch])
        else:
            _, expected = plain(on_device(batch))
        assert torch.equal(output, expected), number
    shift, plain_shift = model.module.shift, plain.module.shift
    assert (int(shift.calls), shift.modes) == (int(plain_shift.calls), plain_shift.modes)
    assert_same(model, plain)


@pytest.mark.parametrize("threads", [False, True])
def test_modes_may_switch_and_models_be_detached_with_a_batch_that_came_ahead(threads):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    run_ranks(switch_modes, 2, "farandole", seed=seed, threads=threads)


def switch_too_late(rank: int, world_size: int) -> None:
    model = wrapped(Mixed(1))
    pipeline = TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), lr=0.1), DEVICE)
    iterator = iter(make_batches(3, 4))
    pipeline.progress(iterator)
    model.eval()
    model(on_device(make_batches(4, 1)[0]))  # counts
    with pytest.raises(RuntimeError, match=r"batch 1 has been through 'shift' in training mode"):
        pipeline.progress(iterator)
    assert len(drain(pipeline, iterator)) == 2


def test_a_batch_that_cannot_be_taken_back_is_an_error():
    run_ranks(switch_too_late, 2, "farandole")


class Late(Mixed):
    """Its module writes to its buffer for the second batch, and not for the first."""

    class Shift(Mixed.Shift):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.modes.append(self.training)
            if len(self.modes) > 1:
                self.calls += 1
            return ids + 7 * self.training


def switch_after_a_late_write(rank: int, world_size: int) -> None:
    model = wrapped(Late(1))
    pipeline = TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), lr=0.1), DEVICE)
    iterator = iter(make_batches(3, 4))
    pipeline.progress(iterator)
    model.eval()
    with pytest.raises(RuntimeError, match=r"batch 1 .* in training mode.* kept of 'shift\.calls' before that"):
        pipeline.progress(iterator)
    assert len(drain(pipeline, iterator)) == 2


def test_a_batch_whose_run_was_the_first_to_write_to_a_buffer_cannot_be_taken_back():
    run_ranks(switch_after_a_late_write, 2, "farandole")


def reset_after_a_late_write(rank: int, world_size: int, kind: type[Mixed]) -> None:
    model = wrapped(kind(1))
    pipeline = TrainPipelineSparseDist(model, torch.optim.SGD(model.parameters(), lr=0.1), DEVICE)
    pipeline.progress(iter(make_batches(3, 4)))
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        pipeline.reset()
    texts = [str(each.message) for each in found]
    if kind is Late:
        assert len(texts) == 1 and texts[0].startswith("batch 1 is not computed, and what 'shift' wrote for it ahead")
        assert "nothing is kept of 'shift.calls' before that" in texts[0] and found[0].filename == __file__
    else:
        assert not texts
    assert int(model.module.shift.calls) == 1


@pytest.mark.parametrize("kind", [Mixed, Late])
def test_a_discarded_batch_whose_run_stays_says_so(kind):
    run_ranks(reset_after_a_late_write, 2, "farandole", kind=kind)


def attach_another_mixed(rank: int, world_size: int) -> None:
    """What came ahead for one model is none of the other's business, and comes ahead there in its turn."""
    models = [wrapped(Mixed(seed)) for seed in (1, 2)]
    plains = [wrapped(Mixed(seed)) for seed in (1, 2)]
    optimizers, plain_optimizers = (
        [torch.optim.SGD(each.parameters(), lr=0.1) for each in of] for of in (models, plains)
    )
    pipeline = TrainPipelineSparseDist(models[0], optimizers[0], DEVICE)
    batches = make_batches(3, 6)
    iterator = iter(batches)
    outputs = [pipeline.progress(iterator) for _ in range(2)]
    pipeline.attach(models[1], optimizers[1])
    outputs += drain(pipeline, iterator)
    expected = plain_loop(plains[0], plain_optimizers[0], batches[:2])
    expected += plain_loop(plains[1], plain_optimizers[1], batches[2:])
    assert all(map(torch.equal, outputs, expected))
    assert_same(models[1], plains[1])
    assert [int(model.module.shift.calls) for model in models] == [2, 4]


def test_another_model_processes_the_batches_that_it_computes():
    run_ranks(attach_another_mixed, 2, "farandole")


def process_uneven(rank: int, world_size: int) -> None:
    model, plain = wrapped(Mixed(1)), wrapped(Mixed(1))
    optimizer, plain_optimizer = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    batches = make_batches(3, 3 + rank)
    outputs = drain(pipeline, iter(batches))
    assert len(pipeline.unused_batches) == rank
    outputs += drain(pipeline, iter(batches))
    expected = plain_loop(plain, plain_optimizer, batches[:3]) + plain_loop(plain, plain_optimizer, batches[:3])
    assert all(map(torch.equal, outputs, expected))
    iterator = iter(batches)
    pipeline.progress(iterator)
    pipeline.reset()
    assert int(model.module.shift.calls) == 7


def test_batches_that_are_not_computed_leave_nothing_in_what_processed_them():
    run_ranks(process_uneven, 2, "farandole")
