"""What a step of a pipeline looks at, and enters, in C++."""

from __future__ import annotations

import collections
import functools
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from farandole._C import NoGrad, Nothing, ProfilerRange, are_families, are_items, families, write_counts
from farandole.sparse._batch_paths import tensors_in
from farandole.sparse._given_call import GivenCall
from farandole.sparse._input_writes import InputWrites
from farandole.sparse._model_state import ModelState


def random_tree(pick: random.Random, depth: int) -> nn.Module:
    tree = nn.ModuleDict()
    for name in "abc"[: pick.randrange(4)] if depth else ():
        tree[name] = random_tree(pick, depth - 1)
    return tree


def listed(modules: list[nn.Module]) -> list[Any]:
    return [member for module in modules for member in (module, *module._modules.values())]


def change(pick: random.Random, modules: list[Any]) -> None:
    module = pick.choice(modules)
    match pick.randrange(4):
        case 0:
            module["new"] = nn.Identity()
        case 1 if len(module):
            del module[pick.choice(list(module))]
        case 2 if len(module):
            module[pick.choice(list(module))] = nn.ModuleDict()
        case 3 if len(module):  # to another parent
            name = pick.choice(list(module))
            pick.choice(modules)["moved"] = module.pop(name)


def test_a_tree_of_modules_is_known_again_until_it_changes():
    pick = random.Random(seed := random.randrange(1 << 30))
    for _ in range(200):
        modules: list[Any] = [each for each in random_tree(pick, 3).modules() if isinstance(each, nn.ModuleDict)]
        known = families(modules)
        assert known == listed(modules), f"seed {seed}"
        assert are_families(modules, known), f"seed {seed}"
        change(pick, modules)
        assert are_families(modules, known) == (listed(modules) == known), f"seed {seed}"


def test_families_of_scripted_modules_are_their_children():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    known = families([scripted])
    assert len(known) == 3 and are_families([scripted], known)
    with pytest.raises(AttributeError, match="_modules"):
        families([torch.ones(1)])  # type: ignore[list-item]


def test_items_are_known_by_identity_and_order():
    pick = random.Random(seed := random.randrange(1 << 30))
    for _ in range(200):
        held = {f"key{place}": object() for place in range(pick.randrange(5))}
        names, values = [*held], [*held.values()]
        assert are_items(held, names, values)
        match pick.randrange(4):
            case 0:
                held["new"] = object()
            case 1 if held:
                held[pick.choice(names)] = object()
            case 2 if held:
                del held[pick.choice(names)]
            case 3 if held:
                held[names[0]] = held.pop(names[0])  # behind the others
        same = [*held] == names and [*held.values()] == values
        assert are_items(held, names, values) == same, f"seed {seed}"


def test_writes_are_counted_as_torch_does():
    with torch.inference_mode():
        of_inference = torch.ones(2)
    tensors: list[torch.Tensor | None] = [torch.ones(2), None, of_inference, torch.ones(2)]
    for times in range(3):
        assert write_counts(tensors) == (0, None, 0, times)
        tensors[3].mul_(2)  # type: ignore[union-attr]
    with pytest.raises(TypeError, match="expected a tensor or None, got a list"):
        write_counts([[]])  # type: ignore[list-item]


class Features:
    """As torchrec's: offsets are made when somebody asks."""

    def __init__(self) -> None:
        self._values, self._lengths, self._offsets = torch.ones(4), torch.ones(4, dtype=torch.int64), None

    def values(self) -> torch.Tensor:
        return self._values

    def lengths(self) -> torch.Tensor:
        return self._lengths

    def weights_or_none(self) -> None:
        return None

    def offsets_or_none(self) -> Any:
        return self._offsets


def test_writes_to_inputs_are_found():
    pick = random.Random(seed := random.randrange(1 << 30))
    for _ in range(200):
        features, tensor, inner = Features(), torch.ones(3), [torch.ones(2), {"key": torch.ones(2)}]
        inputs = [tensor, features, *([inner] if pick.random() < 0.5 else [])]
        by_value = pick.random() < 0.5
        writes = InputWrites(inputs, by_value)
        assert not writes.found_any(), f"seed {seed}"
        features._offsets = torch.arange(5)  # is no write
        assert not writes.found_any(), f"seed {seed}"
        match pick.randrange(5):
            case 0:
                tensor.add_(1)
                expected = True
            case 1:
                features._lengths[0] = 3
                expected = True
            case 2:
                inner[1]["key"].zero_()  # type: ignore[index]
                expected = len(inputs) == 3
            case 3:
                inner.append(torch.ones(1))
                expected = len(inputs) == 3
            case _:
                tensor.numpy()[0] = 5
                expected = by_value
        assert writes.found_any() == expected, f"seed {seed}"


def test_contexts_of_a_step_leave_what_they_have_entered():
    nothing = Nothing()
    with nothing(1, any=2) as entered:
        assert entered is None
    for before in (True, False):
        with torch.set_grad_enabled(before):
            with pytest.raises(KeyError), NoGrad():
                assert not torch.is_grad_enabled()
                with NoGrad():
                    pass
                assert not torch.is_grad_enabled()
                raise KeyError
            assert torch.is_grad_enabled() == before


def test_ranges_are_named_by_their_number():
    with torch.profiler.profile() as profile:
        for range_ in (ProfilerRange("## a {} ##", 1 << 40), ProfilerRange("## b {} ##"), ProfilerRange("## c ##", 1)):
            with range_:
                pass
    names = [event.name for event in profile.events() if event.name.startswith("##")]
    assert names == [f"## a {1 << 40} ##", "## b {} ##", "## c ##"]
    for wrong in ((1,), ("name", "number"), ()):
        with pytest.raises(TypeError):
            ProfilerRange(*wrong)  # type: ignore[arg-type]


class Slotted:
    __slots__ = ("part",)

    def __init__(self, part: Any) -> None:
        self.part = part


def random_value(pick: random.Random, depth: int) -> Any:
    kind = pick.randrange(8 if depth else 2)
    if kind < 2:
        return torch.ones(2) if kind else pick.choice([None, 3, "text"])
    parts = [random_value(pick, depth - 1) for _ in range(pick.randrange(3))]
    named = {f"key{place}": part for place, part in enumerate(parts)}
    match kind:
        case 2:
            return parts
        case 3:
            return tuple(parts)
        case 4:
            return named
        case 5:
            return collections.UserDict(named)
        case 6:
            return Slotted(parts[0] if parts else None)
        case _:
            return types.SimpleNamespace(**named)


def change_some(pick: random.Random, values: list[Any]) -> None:
    """Of all that can be changed in these, one thing, or nothing."""
    places: list[Any] = []
    todo = [*values]
    for value in todo:
        if isinstance(value, torch.Tensor):
            places.append(value.zero_)
        elif isinstance(value, (list, tuple)):
            todo += value
        elif isinstance(value, (dict, collections.UserDict)):
            todo += value.values()
            places.append(functools.partial(value.__setitem__, pick.choice([*value, "new"]), torch.ones(1)))
            places += [functools.partial(value.pop, key) for key in value]
        elif isinstance(value, Slotted):
            todo.append(value.part)
            places.append(functools.partial(setattr, value, "part", torch.ones(1)))
        elif isinstance(value, types.SimpleNamespace):
            todo += vars(value).values()
            places.append(functools.partial(setattr, value, "key0", torch.ones(1)))
        if isinstance(value, list):
            places.append(functools.partial(value.append, torch.ones(1)))
            places += [value.pop] if value else []
    pick.choice([lambda: None, *places])()


def test_what_a_module_was_given_is_known_as_by_a_walk_through_it():
    pick = random.Random(seed := random.randrange(1 << 30))
    found = collections.Counter[bool]()
    for _ in range(600):
        args = tuple(random_value(pick, 3) for _ in range(2))
        given = GivenCall(args, {"key": random_value(pick, 2)})
        given.note()
        for _ in range(2):
            change_some(pick, [*given.call[0], *given.call[1].values()])
            walked = given._are_noted(tensors_in(given._parts))
            assert given.is_as_noted() == walked, f"seed {seed}"
            found[walked] += 1
            given.note()
            assert given.is_as_noted(), f"seed {seed}"
    assert min(found.values()) > 100, f"seed {seed}: {found}"


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))
        self.inner = nn.Linear(1, 1)
        self.names, self.held, self.empty, self.seen = ["a"], {"key": 1}, [], {1}
        self.config = Config()


class Config:
    def __init__(self) -> None:
        self.width = 1


def test_a_model_that_is_the_same_is_known_in_one_look():
    pick = random.Random(seed := random.randrange(1 << 30))
    changes: list[Callable[[Any], object]] = [
        lambda model: None,
        lambda model: model.eval(),  # is none of it
        lambda model: model.train(),
        lambda model: model.names.append("b"),
        lambda model: model.held.update(key=2),
        lambda model: model.empty.append(1),
        lambda model: model.seen.add(2),
        lambda model: setattr(model.config, "width", 2),
        lambda model: setattr(model, "count", torch.zeros(1)),
        lambda model: setattr(model, "new", 1),
        lambda model: setattr(model.inner, "bias", None),
        lambda model: setattr(model, "inner", nn.Linear(1, 1)),
    ]
    for _ in range(300):
        model = Stateful()
        state = ModelState(model, ("training",), True)
        changed = False
        for change in pick.choices(changes, k=2):
            change(model)
            changed = changed or changes.index(change) > 2
            assert state.has_changed() == changed, f"seed {seed}"
            assert (state.as_now() is state) == (not changed), f"seed {seed}"
