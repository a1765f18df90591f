"""Models around modules that pass for sharded ones, and what a plain forward gives these."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves


class Jagged(metaclass=torch.fx.ProxyableClassMeta):
    """As much of a KeyedJaggedTensor as models use here."""

    def __init__(self, keys: list[str], values: torch.Tensor, weights: torch.Tensor | None = None) -> None:
        self._keys = keys
        self._values = values
        self._weights = weights

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> torch.Tensor:
        return self._values

    def weights(self) -> torch.Tensor:
        assert self._weights is not None
        return self._weights

    def halves(self) -> list[Jagged]:
        return [Jagged(["half"], part) for part in self._values.repeat(2).split(4)]


def computed(graph: Any, post: Any, batch: Any) -> tuple[Any, dict[str, list[Any]]]:
    """What an InputGraph gives sharded modules of a batch, and what PostProcessing has noted."""
    with torch.no_grad(), post.noting() as results:
        return graph(batch), results


def _tensor(seed: int) -> torch.Tensor:
    return torch.randn(4, generator=torch.Generator().manual_seed(seed))


@dataclass
class Batch:
    seed: int = 0
    ids: torch.Tensor = field(init=False)
    table: dict[str, torch.Tensor] = field(init=False)
    pair: list[torch.Tensor] = field(init=False)
    jagged: Jagged = field(init=False)
    nothing: None = None

    def __post_init__(self) -> None:
        seed = 10 * self.seed
        self.ids = _tensor(seed)
        self.table = {"a": _tensor(seed + 1), "b": _tensor(seed + 2)}
        self.pair = [_tensor(seed + 3), _tensor(seed + 4)]
        self.jagged = Jagged(["x", "y"], _tensor(seed + 5), _tensor(seed + 6))


class Sharded(nn.Module):
    """Has the methods that make a module a sharded one; its forward takes anything."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 0.5))

    def create_context(self) -> None: ...
    def input_dist(self) -> None: ...
    def compute_and_output_dist(self) -> None: ...

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return sum((tensor.sum() for tensor in tensors_of((args, kwargs))), start=self.weight)


class Counter(nn.Module):
    """Post-processing with state: each call adds one more."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + self.count


class Reader(nn.Module):
    """Post-processing by what others have."""

    def __init__(self, seen: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("seen", seen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.seen[0]


class Holder(nn.Module):
    """Post-processing by a module that it has not registered."""

    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.others = [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.others[0].weight.detach().sum()


class Untraceable(nn.Module):
    """Dense code that depends on values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) if float(x.detach().sum()) > 0 else self.linear(-x)


def tensors_of(value: Any) -> list[torch.Tensor]:
    parts = [leaf.values() if isinstance(leaf, Jagged) else leaf for leaf in tree_leaves(value)]
    return [part for part in parts if isinstance(part, torch.Tensor)]


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(item, other[key]) for key, item in one.items())
    return same(vars(one), vars(other)) if isinstance(one, Jagged) else one == other


def _copied(value: Any) -> Any:
    """As it is now, whatever happens to it later."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copied, value))
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return Jagged(*map(_copied, vars(value).values())) if isinstance(value, Jagged) else value


@contextlib.contextmanager
def watched(model: nn.Module, names: tuple[str, ...]) -> Iterator[dict[str, list[tuple[Any, Any]]]]:
    """By name: (args, kwargs) of all calls of these modules."""
    seen: dict[str, list[tuple[Any, Any]]] = {name: [] for name in names}
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(
            lambda _, args, kwargs, name=name: seen[name].append(_copied((args, kwargs))), with_kwargs=True
        )
        for name in names
    ]
    yield seen
    for hook in hooks:
        hook.remove()


Step = tuple[str, tuple[int, ...], Any]  # what, of which values, and a detail of it

_PURE = ("field", "add", "cat", "pick", "cast", "buffer", "constant", "jagged", "quiet")
_IN_PLACE = ("write", "lasting", "augment", "store", "replace field", "write field")


class RandomModel(nn.Module):
    """A random straight program over parts of the batch, with post-processing, dense layers and sharded modules."""

    def __init__(self, seed: int, in_place: bool = False) -> None:
        super().__init__()
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.posts = nn.ModuleList(Counter() for _ in range(2))
        self.dense = nn.ModuleList(Untraceable() for _ in range(2))
        self.sharded = nn.ModuleList()
        self.register_buffer("offset", torch.arange(4.0))
        self.program: list[Step] = [("field", (), rng.randrange(7))]
        for _ in range(rng.randint(4, 16)):
            what = rng.choice(_PURE + (("post",) * 3 + ("embed",) * 4 + ("dense", "random")) + _IN_PLACE * in_place)
            of = tuple(rng.randrange(len(self.program)) for _ in range(2))
            detail: Any = rng.randrange(7) if what in ("field", "embed") else rng.randrange(2)
            if what == "embed":
                detail = (len(self.sharded), detail)
                self.sharded.append(Sharded())
            self.program.append((what, of, detail))

    def forward(self, batch: Batch, scale: float = 1.0) -> torch.Tensor:
        values: list[Any] = []
        for what, of, detail in self.program:
            values.append(self._step(batch, what, [values[index] for index in of], detail))
        return sum(values) * scale

    def _step(self, batch: Batch, what: str, of: list[Any], detail: Any) -> Any:
        first, second = of or (None, None)
        if what == "field":
            jagged = batch.jagged
            return (
                lambda: batch.ids,
                lambda: batch.table["a"],
                lambda: batch.table["b"],
                lambda: batch.pair[1],
                lambda: jagged.values() + 1,
                lambda: jagged.weights(),
                lambda: jagged.halves()[1].values(),
            )[detail]()
        if what == "embed":
            number, form = detail
            args, kwargs = self._form(batch, form, first, second)
            return self.sharded[number](*args, **kwargs)
        if what == "post":
            return self.posts[detail](first)
        if what == "dense":
            return self.dense[detail](first)
        if what == "write field":
            (batch.ids if detail else batch.table["a"]).mul_(2)
            return first
        if what == "write":  # a part of another value, at times
            return (first[1:] if detail else first * 2).add_(1).sum() + second
        if what == "lasting":
            self.offset.add_(1)
            return first
        if what == "augment":
            first += 1
            return first if detail else second
        if what == "store":
            batch.table["a" if detail else "b"] = second
            return first
        if what == "replace field":
            if detail:
                batch.ids = second
            else:
                batch.jagged = Jagged(["x", "y"], first, second)
            return first
        return {
            "add": lambda: first * 2 - second,
            "cat": lambda: torch.cat([first[2:], second[:2]]),
            "pick": lambda: torch.stack([first, second])[detail],
            "cast": lambda: first.to(torch.float64).view(4).to(dtype=torch.float32),
            "buffer": lambda: first + self.offset,
            "constant": lambda: torch.maximum(first, torch.ones(4) * 0.25),
            "jagged": lambda: Jagged(["k"], values=first, weights=second).weights(),
            "quiet": lambda: nn.functional.dropout(first, 0.5, training=False),
            "random": lambda: first + (torch.rand(4) if detail else torch.rand_like(second)),
        }[what]()

    def _form(self, batch: Batch, form: int, first: Any, second: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return (
            ((first,), {}),
            ((first, None, "mean"), {"weights": second}),
            (([first, (second, None)],), {}),
            ((), {"features": {"x": first, "y": [second, 3]}}),
            ((Jagged(["k", "l"], first, weights=second),), {}),
            ((batch.jagged, first), {}),
            ((batch.nothing, batch.table["b"]), {"weights": (first,)}),
        )[form]

    def pipelined(self) -> set[str]:
        """Of programs without in-place steps: whose inputs depend on nothing but the batch. Calls of one module of
        post-processing go together."""
        ahead = set(range(len(self.program)))
        before = None
        while before != len(ahead):
            before = len(ahead)
            for index, (what, of, detail) in enumerate(self.program):
                calls = [i for i, (other, _, d) in enumerate(self.program) if (other, d) == (what, detail)]
                is_alone = what != "post" or all(self.program[call][1][0] in ahead for call in calls)
                fine = what not in ("dense", "embed", "random") and is_alone
                if not fine or any(i not in ahead for i in self._used(what, of)):
                    ahead.discard(index)
        return {
            f"sharded.{detail[0]}"
            for what, of, detail in self.program
            if what == "embed" and all(index in ahead for index in self._given(detail[1], of))
        }

    def _used(self, what: str, of: tuple[int, ...]) -> tuple[int, ...]:
        return () if what == "field" else of[:1] if what in ("post", "cast", "buffer", "constant", "quiet") else of

    def _given(self, form: int, of: tuple[int, ...]) -> tuple[int, ...]:
        return of[:1] if form in (0, 5, 6) else of


class Net(nn.Module):
    """Has some of everything; its forward is given."""

    def __init__(self, forward: Callable[[Any, Batch], Any]) -> None:
        super().__init__()
        self.a = Sharded()
        self.b = Sharded()
        self.count = Counter()
        self.scale = nn.Linear(4, 4)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.dense = Untraceable()
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.relu = nn.ReLU(inplace=True)
        self.gain = nn.Parameter(torch.ones(4))
        self.fixed = nn.Parameter(torch.full((4,), 2.0), requires_grad=False)
        self.sharing = nn.Sequential(self.scale, self.count)
        self.register_buffer("offset", torch.arange(4.0))
        self.register_buffer("part", self.offset[:2])
        self.register_buffer("mean", self.norm.running_mean[1:])
        self.register_buffer("bias", self.scale.bias.detach()[:1])
        self.register_buffer("rows", torch.ones(8, 4))
        self.reader = Reader(self.norm.running_mean)
        self.holder = Holder(self.scale)
        self._forward = forward

    def forward(self, batch: Batch) -> Any:
        return self._forward(self, batch)


def last(*values: Any) -> Any:
    return values[-1]
