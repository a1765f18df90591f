"""Models, and batches, that change under a pipeline: an error of the next step, and no other inputs in silence."""

from __future__ import annotations

import enum
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from farandole.sparse import TrainPipelineSparseDist
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import (
    ROWS,
    Batch,
    Recommender,
    ShardedTables,
    assert_same,
    drain,
    made,
    make_batches,
    on_device,
    plain_loop,
    wrapped,
)


@dataclass
class Shifted(Batch):
    offsets: Any = None


class Remapped(Recommender):
    """Its ids depend on attributes, on parts of the batch, on a frozen module and on a frozen parameter."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.remap = torch.nn.Embedding(ROWS, 1)
        self.remap.weight = torch.nn.Parameter(torch.arange(float(ROWS)).flip(0).unsqueeze(1), requires_grad=False)
        self.shift = torch.nn.Parameter(torch.tensor(3.0), requires_grad=False)
        self.is_remapped = True

    def forward(self, batch: Shifted) -> tuple[torch.Tensor, torch.Tensor]:
        ids = batch.ids + self.shift.long()
        if self.is_remapped:
            ids = self.remap(ids % ROWS).squeeze(2).long()
        if isinstance(batch.offsets, list):
            ids = ids + 1
        elif batch.offsets is not None:
            ids = ids * 2
        return self.score(torch.cat([self.tables[0](ids), batch.dense], 1), batch.labels)


def batches_with(offsets: Any, number: int, seed: int = 3) -> list[Shifted]:
    return [Shifted(**vars(batch), offsets=offsets) for batch in make_batches(seed, number, sizes=(4, 5))]


def toggle(inner: Remapped) -> None:
    inner.is_remapped = False


def train_remap(inner: Remapped) -> None:
    inner.remap.requires_grad_(True)


def train_shift(inner: Remapped) -> None:
    inner.shift.requires_grad_(True)


def replace_remap(inner: Remapped) -> None:
    inner.remap = torch.nn.Embedding.from_pretrained(inner.remap.weight)


def replace_table(inner: Remapped) -> None:
    inner.tables[0] = ShardedTables(5)


def add_table(inner: Remapped) -> None:
    inner.dense.add_module("more", ShardedTables(5))


def remove_table(inner: Remapped) -> None:
    del inner.tables[0]


def hide_remap(inner: Remapped) -> None:
    vars(inner)["remap"] = torch.nn.Identity()  # past Module's own __setattr__


class Counted(Batch):
    def counted(self) -> torch.Tensor:
        """In place, which torch.fx does not see."""
        self.ids += 1
        return self.ids


class Counting(Recommender):
    def forward(self, batch: Counted) -> tuple[torch.Tensor, torch.Tensor]:
        return self.score(torch.cat([self.tables[0](batch.counted()), batch.dense], 1), batch.labels)


def write_again(rank: int, world_size: int) -> None:
    (model, optimizer), (plain, plain_optimizer) = made(Counting(1)), made(Counting(1))
    batches, again = ([Counted(**vars(batch)) for batch in make_batches(3, 4)] for _ in range(2))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    with pytest.raises(RuntimeError, match=r"^tensors among the inputs of tables\.0 have been written to since these"):
        drain(pipeline, iter(batches[:2]))
    pipeline.detach()
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, tracing="hooks")  # which see it, and leave it there
    with pytest.warns(UserWarning, match="exchange their inputs in the forward"):
        outputs = drain(pipeline, iter(batches[2:]))
    assert len(outputs) == 2 and all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, again[2:])))


def test_inputs_that_the_forward_writes_to_a_second_time():
    run_ranks(write_again, 2, "farandole")


def change(rank: int, world_size: int, what: Callable[[Any], None], match: str) -> None:
    model, optimizer = made(Remapped(1))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
    iterator = iter(batches_with(torch.ones(2), 6))
    for _ in range(3):
        pipeline.progress(iterator)
    what(model.module)
    with pytest.raises(RuntimeError, match=match):
        pipeline.progress(iterator)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        (toggle, r"tables\.0 is called with other inputs"),
        (train_remap, r"^remap has changed under its pipeline: expected no trainable parameters \(weight\)"),
        (train_shift, r"^shift has changed under its pipeline: expected no trainable parameter"),
        (replace_remap, r"^remap has changed under its pipeline: expected the module and the forward"),
        (hide_remap, r"^remap has changed under its pipeline: expected the module and the forward"),
        (replace_table, r"^tables\.0 has changed under its pipeline: expected the module and the forward"),
        (add_table, r"^dense\.more has changed under its pipeline: expected the sharded modules that were attached"),
        (remove_table, r"^tables\.0 has changed under its pipeline: expected the module and the forward"),
    ],
)
def test_a_model_that_changes_is_an_error(what, match):
    run_ranks(change, 2, "farandole", what=what, match=match)


def vary(rank: int, world_size: int) -> None:
    """fx has taken parts for tensors; from the first batch on which is none its values are compared."""
    model, optimizer = made(Remapped(1))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    plain, plain_optimizer = made(Remapped(1))
    tensors, none, lists = batches_with(torch.ones(2), 4), batches_with(None, 1, 4), batches_with([torch.ones(2)], 1, 5)
    iterator = iter([*tensors, *none, *tensors, *lists, *tensors])
    seen: list[Any] = []
    for _ in range(14):
        try:
            seen.append(pipeline.progress(iterator))
        except RuntimeError as error:
            seen.append(error)
    for index in (4, 9):
        assert "tables.0 is called with other inputs" in str(seen[index]), seen[index]
    outputs = [*seen[:4], *seen[5:9], *seen[10:]]
    assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, tensors * 3)))
    assert_same(model, plain)


def test_a_part_of_a_batch_that_becomes_none_or_another_type_is_an_error_of_its_batch():
    run_ranks(vary, 2, "farandole")


class Hidden(Recommender):
    """No fx graph and no attribute of the model has what its ids depend on."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.settings = types.SimpleNamespace(ids=types.SimpleNamespace(adds=0))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        ids = batch.ids + self.settings.ids.adds
        return self.score(torch.cat([self.tables[0](ids), batch.dense], 1), batch.labels)


def change_hidden(rank: int, world_size: int) -> None:
    model = wrapped(Hidden(1))
    optimizer = torch.optim.SGD(model.module.dense.parameters(), lr=0.5)
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    iterator = iter(make_batches(3, 40, sizes=(4, 5)))
    for _ in range(3):
        pipeline.progress(iterator)
    model.module.settings.ids.adds = 1
    with pytest.raises(RuntimeError, match=r"tables\.0 is called with other inputs"):
        for _ in range(16):
            pipeline.progress(iterator)


def test_what_no_attribute_tells_is_found_within_sixteen_steps():
    run_ranks(change_hidden, 2, "farandole")


class Offset(enum.Enum):
    NONE = 0
    ONE = 1


@dataclass
class Config:
    adds: int = 0


class Configured(Recommender):
    """Its ids depend on what it has in an attribute."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.config, self.by_name, self.by_index, self.kind = Config(), {"adds": 0}, [0], Offset.NONE
        self.tensors = {"adds": torch.zeros((), dtype=torch.int64, device=DEVICE)}
        self.signed: Callable[[torch.Tensor], torch.Tensor] = operator.pos

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self.signed(batch.ids) + self.config.adds + self.by_name["adds"] + self.by_index[0] + self.kind.value
        rows = self.tables[0](ids + self.tensors["adds"])
        return self.score(torch.cat([rows, batch.dense], 1), batch.labels)


SETTINGS: dict[str, Callable[[Any], None]] = {
    "a field": lambda model: setattr(model.config, "adds", 1),
    "another object": lambda model: setattr(model, "config", Config(1)),
    "an item": lambda model: model.by_name.update(adds=1),
    "an item of a list": lambda model: model.by_index.__setitem__(0, 1),
    "an enum": lambda model: setattr(model, "kind", Offset.ONE),
    "a function": lambda model: setattr(model, "signed", operator.neg),
    "a tensor in a dict": lambda model: model.tensors["adds"].add_(1),
    "a hook": lambda model: model.tables[0].register_forward_pre_hook(lambda _, given: (given[0] + 1,)),
}


def configure(rank: int, world_size: int, what: str) -> None:
    model, optimizer = made(Configured(1))
    model.eval()  # no backward, in which the first to fail would leave the others
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True)
    batches = make_batches(3, 8, sizes=(4, 5))
    iterator = iter(batches)
    for batch in batches[:3]:
        assert torch.equal(pipeline.progress(iterator), model(on_device(batch))[1])
    SETTINGS[what](model.module)
    with pytest.raises(RuntimeError, match=r"^tables\.0 is called with other inputs"):
        pipeline.progress(iterator)
    model.module.tables[0]._forward_pre_hooks.clear()
    pipeline.detach()
    pipeline.attach()
    for batch in batches[4:]:
        assert torch.equal(pipeline.progress(iterator), model(on_device(batch))[1])


@pytest.mark.parametrize("what", SETTINGS)
def test_what_an_attribute_has_in_it_is_looked_at(what):
    run_ranks(configure, 2, "farandole", what=what)


class Truncated(Recommender):
    """Looks up as many columns as a setting says."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.settings = types.SimpleNamespace(columns=9)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        columns = self.settings.columns
        rows = self.tables[0](batch.ids[:, :columns])
        return self.score(torch.cat([rows, batch.dense[:columns]], 1), batch.labels[:columns])


def change_shapes(rank: int, world_size: int) -> None:
    model, optimizer = made(Truncated(1))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    iterator = iter(make_batches(3, 9, sizes=(4, 5)))
    for _ in range(3):
        pipeline.progress(iterator)
    model.module.settings.columns = 2
    with pytest.raises(RuntimeError, match=r"tables\.0 is called with other inputs"):
        pipeline.progress(iterator)


def test_other_shapes_are_found_at_once():
    run_ranks(change_shapes, 2, "farandole")


def swap_dense(rank: int, world_size: int) -> None:
    """Dense parts may come and go."""
    model, optimizer = made(Remapped(1))
    plain, plain_optimizer = made(Remapped(1))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    batches = batches_with(torch.ones(2), 6)
    iterator = iter(batches)
    outputs = [pipeline.progress(iterator) for _ in range(3)]
    model.module.dense.add_module("sign", torch.nn.Tanh())
    outputs += drain(pipeline, iterator)
    expected = plain_loop(plain, plain_optimizer, batches[:3])
    plain.module.dense.add_module("sign", torch.nn.Tanh())
    expected += plain_loop(plain, plain_optimizer, batches[3:])
    assert all(map(torch.equal, outputs, expected))


def test_dense_modules_may_come():
    run_ranks(swap_dense, 2, "farandole")
