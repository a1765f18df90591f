"""Batches of all kinds: nothing is lost on the way to the device, and all tensors are recorded there."""

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from farandole.sparse import _batches
from farandole.sparse._batches import record_stream, to_device
from support.streams import Device

CPU, META = torch.device("cpu"), torch.device("meta")


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


class Index:
    """Of what the batch holds, and stays where it was made."""

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids


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


def test_what_is_made_after_init_moves_as_it_is():
    batch = Made(torch.ones(2))
    batch.extra, batch.doubled = torch.ones(3), torch.ones(5)
    moved = to_device(batch, META)
    assert moved.doubled.is_meta and moved.doubled.shape == (5,) and moved.extra.is_meta
    assert moved.index is batch.index
    batch.index = Index(batch.ids)
    assert to_device(batch, CPU).index is batch.index
    with pytest.raises(TypeError, match=r"a batch holds a Index, which has no to\(\)"):
        to_device(batch, META)


@dataclasses.dataclass
class Normalized:
    """``__post_init__`` over values that it has seen before would be wrong."""

    dense: torch.Tensor
    scale: dataclasses.InitVar[float]

    def __post_init__(self, scale: float) -> None:
        self.dense = self.dense * scale

    def set_scale(self, scale: torch.Tensor) -> None:
        self.scale = scale  # no field


@dataclasses.dataclass(frozen=True)
class Slots:
    __slots__ = ("ids", "number")
    ids: torch.Tensor
    number: int


def test_a_dataclass_is_not_made_a_second_time():
    batch = Normalized(torch.ones(2), 3.0)
    for _ in range(3):
        batch = to_device(batch, CPU)
    assert torch.equal(batch.dense, torch.full((2,), 3.0))
    batch.set_scale(torch.ones(1))
    assert to_device(batch, META).scale.is_meta
    slots = to_device(Slots(torch.ones(2), 4), META)
    assert type(slots) is Slots and slots.ids.is_meta and slots.number == 4


class Pair(NamedTuple):
    ids: torch.Tensor
    number: int


class Named(Pair):
    pass


class Tuple(tuple):
    pass


class List(list):
    pass


class Dict(dict):
    pass


class Attributes(dict):
    """Whose items are its attributes."""

    __getattr__ = dict.__getitem__


OF_ALL_KINDS = {
    "dataclass": lambda: Set(torch.ones(2)),
    "frozen": lambda: Frozen(torch.ones(2)),
    "namedtuple": lambda: Named(torch.ones(2), 3),
    "tuple": lambda: Tuple([torch.ones(2), 3]),
    "list": lambda: List([torch.ones(2), 3]),
    "dict": lambda: Dict(ids=torch.ones(2), number=3),
    "attributes": lambda: Attributes(ids=torch.ones(2), number=3),
}


@pytest.mark.parametrize("kind", OF_ALL_KINDS)
def test_attributes_besides_fields_and_items_move_along(kind):
    batch = OF_ALL_KINDS[kind]()
    kept = object()
    batch.__dict__.update(weight=3.0, besides=[torch.ones(4), kept], back=None if isinstance(batch, tuple) else batch)
    moved = to_device(batch, META)
    assert type(moved) is type(batch) and moved is not batch
    assert moved.weight == 3.0 and moved.besides[0].is_meta and moved.besides[1] is kept
    first = moved.ids if hasattr(moved, "ids") else next(iter(moved.values() if isinstance(moved, dict) else moved))
    assert first.is_meta and batch.besides[0].device == CPU
    assert moved.back is (None if isinstance(batch, tuple) else moved)
    assert sorted(part.shape for part in recorded(moved)) == [(2,), (4,)]


def recorded(batch: Any) -> list[torch.Tensor]:
    return list(_batches._parts(batch, set()))


class Own(dict):
    """Whose attributes are its items."""

    def __init__(self, **items: Any) -> None:
        super().__init__(**items)
        self.__dict__ = self


def test_items_that_are_attributes_stay_so():
    moved = to_device(Own(ids=torch.ones(2)), META)
    assert moved.ids.is_meta and moved.__dict__ is moved and len(recorded(moved)) == 1


def test_containers_keep_their_kind_and_order():
    torchs = torch.ones(2, 2).max(0)
    default = collections.defaultdict(list, ids=torch.ones(2))
    ordered = collections.OrderedDict(b=torch.ones(2), a=1)
    moved = to_device((torchs, torch.Size([3]), default, ordered), META)
    assert isinstance(moved[0], torch.return_types.max) and moved[0].indices.is_meta
    assert moved[1] == torch.Size([3]) and type(moved[1]) is torch.Size
    assert moved[2]["others"] == [] and list(moved[3]) == ["b", "a"]


def test_a_container_may_be_filled_again():
    for batch in (Set(torch.ones(2)), [torch.ones(2)], {"ids": torch.ones(2)}):
        assert to_device(batch, CPU) is not batch
    for unchanged in ((torch.ones(2), 3), Pair(torch.ones(2), 3)):
        assert to_device(unchanged, CPU) is unchanged


class Forgetful:
    def to(self, device: torch.device, non_blocking: bool = False) -> None:
        pass


NO_BATCHES = {
    "int": (lambda: 3, "the batch is a int: expected tensors, objects with to"),
    "ints": (lambda: (1, 2.0), "the batch is a tuple of float, int: expected tensors"),
    "texts": (lambda: {"a": "text"}, "the batch is a dict of str: expected"),
    "empty": (lambda: [], "the batch is a list: expected"),
    "none": (lambda: Forgetful(), r"Forgetful.to\(\) returned None: expected the same"),
    "none within": (lambda: (torch.ones(2), Forgetful()), r"Forgetful.to\(\) returned None"),
    "object": (lambda: object(), r"a batch holds a object, which has no to\(\): expected tensors"),
    "object within": (lambda: Attributes(ids=object()), r"a batch holds a object, which has no to\(\): expected"),
}


@pytest.mark.parametrize("kind", NO_BATCHES)
def test_what_is_no_batch_is_refused(kind):
    make, told = NO_BATCHES[kind]
    batch = make()
    with pytest.raises(TypeError, match=told):
        to_device(batch, META)


def test_all_tensors_of_dataclasses_are_recorded():
    device = Device()
    batch = Made(device.tensor(torch.ones(2)))
    batch.doubled, batch.extra = (device.tensor(torch.ones(3)) for _ in range(2))
    stream = device.Stream(torch.device("cuda"), 0)
    record_stream([batch, "a text"], stream)
    assert all(part.memory.recorded == {stream} for part in (batch.ids, batch.doubled, batch.extra))
    with pytest.raises(TypeError, match=r"a batch holds a object, which has no record_stream\(\)"):
        record_stream([object()], stream)
