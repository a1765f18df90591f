"""Batches that are dataclasses: no field is lost on the way to the device, and all tensors are recorded there."""

import dataclasses
from typing import Any

import pytest
import torch

from farandole.sparse._batches import record_stream, to_device
from support.streams import Device


@dataclasses.dataclass
class Set:
    """Fields that are set later."""

    ids: torch.Tensor
    extra: Any = dataclasses.field(init=False, default=None)
    more: Any = dataclasses.field(init=False)
    parts: Any = dataclasses.field(init=False, default_factory=list)


@dataclasses.dataclass(frozen=True)
class Frozen:
    ids: torch.Tensor
    extra: Any = dataclasses.field(init=False, default=None)


@dataclasses.dataclass
class Made:
    """Fields that are made, of what has no to(), too, and one that is set later."""

    ids: torch.Tensor
    doubled: torch.Tensor = dataclasses.field(init=False)
    index: Any = dataclasses.field(init=False, default=None)
    extra: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.doubled = 2 * self.ids
        self.index = object()


def test_fields_that_are_set_later_move_along():
    batch = Set(torch.ones(2))
    batch.extra, batch.parts = torch.ones(3), [torch.ones(4)]
    moved = to_device(batch, torch.device("meta"))
    assert moved is not batch and not hasattr(moved, "more")
    assert [part.shape for part in (moved.ids, moved.extra, *moved.parts)] == [(2,), (3,), (4,)]
    assert all(part.is_meta for part in (moved.ids, moved.extra, *moved.parts))
    batch.more = object()
    with pytest.raises(TypeError, match=r"a batch holds a object, which has no to\(\)"):
        to_device(batch, torch.device("meta"))
    frozen = Frozen(torch.ones(2))
    object.__setattr__(frozen, "extra", torch.ones(3))
    assert to_device(frozen, torch.device("meta")).extra.is_meta


def test_what_is_made_after_init_is_made_anew():
    batch = Made(torch.ones(2))
    batch.extra = torch.ones(3)
    moved = to_device(batch, torch.device("meta"))
    assert moved.doubled.is_meta and moved.extra.is_meta
    assert moved.index is not None and moved.index is not batch.index


def test_all_tensors_of_dataclasses_are_recorded():
    device = Device()
    batch = Made(device.tensor(torch.ones(2)))
    batch.doubled, batch.extra = (device.tensor(torch.ones(3)) for _ in range(2))
    stream = device.Stream(torch.device("cuda"), 0)
    record_stream([batch, "a text"], stream)
    assert all(part.memory.recorded == {stream} for part in (batch.ids, batch.doubled, batch.extra))
    with pytest.raises(TypeError, match=r"a batch holds a object, which has no record_stream\(\)"):
        record_stream([object()], stream)
