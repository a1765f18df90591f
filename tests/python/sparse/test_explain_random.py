"""Random models whose parts write beside the graph: what explain() says is so, and numbers are the plain loop's, or an error."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from farandole.sparse import TrainPipelineSparseDist
from support.devices import only_on_cpu
from support.recommenders import Request

pytestmark = only_on_cpu("looks at what a model asks of its modules")

_CASES = 60
_ERRORS = ("written to since", "with other inputs", "forward reads it elsewhere")
_PURE = ("field", "add", "cat", "buffer", "constant", "counter", "view", "whole", "norm", "dense") + ("table",) * 4
_HIDDEN = (
    *("write batch", "updating", "read update", "write buffer", "read part", "write plain", "read plain"),
    *("running", "read running", "read counter", "read weight", "in place", "write and return", "replace"),
)


class Table(nn.Module):
    """Notes when its inputs go round, and when they are used."""

    def __init__(self, number: int, log: list[tuple[str, int]]) -> None:
        super().__init__()
        self.number, self.log = number, log
        self.weight = nn.Parameter(torch.full((4,), 0.5))

    def create_context(self) -> None:
        return None

    def input_dist(self, context: None, *args: Any, **kwargs: Any) -> Request:
        self.log.append(("dist", self.number))
        sent = [part.clone() for part in tree_leaves((args, kwargs))]
        return Request(lambda: Request(lambda: sent))

    def compute_and_output_dist(self, context: None, inputs: list[torch.Tensor]) -> torch.Tensor:
        self.log.append(("use", self.number))
        return sum((torch.tanh(part).sum() for part in inputs), start=self.weight)

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.compute_and_output_dist(None, self.input_dist(None, *args, **kwargs).wait().wait())


class Batch:
    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        a, b, x, y, first, second = (torch.randn(4, generator=generator) for _ in range(6))
        self.named, self.listed = {"x": x, "y": y}, [first, second]
        self.a, self.b = a, b

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        pass


class Part(nn.Module):
    """One without trained parameters, or a dense one."""

    def __init__(self, kind: str, tensor: torch.Tensor | None = None) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("tensor", torch.zeros(4) if tensor is None else tensor)
        if kind in ("dense", "updating", "write batch"):
            self.linear = nn.Linear(4, 4)

    def forward(self, x: Any, *others: Any) -> torch.Tensor:
        if self.kind == "counter":
            self.tensor += 1
            return x + 0.1 * self.tensor
        if self.kind == "reader":
            return x + self.tensor[0]
        if self.kind == "view":
            return x.view(4)
        if self.kind == "whole":
            return x.named["x"] * 2
        if self.kind == "write and return":
            return x.mul_(0.9)
        if self.kind == "updating":
            self.tensor.add_(0.1)
        if self.kind == "write batch":
            self.write(*others)
        return self.linear(x)

    def write(self, batch: Batch, y: torch.Tensor, how: int) -> None:
        if how == 0:
            batch.a.add_(1)
        elif how == 1:
            batch.named["x"] = batch.named["x"] * 0.5
        elif how == 2:
            batch.b = batch.b + 1
        elif how == 3:
            batch.listed.reverse()
        else:
            (y.data if how == 4 else y).mul_(0.5)


class Model(nn.Module):
    def __init__(self, seed: int, log: list[tuple[str, int]]) -> None:
        super().__init__()
        pick = random.Random(seed)
        torch.manual_seed(seed)
        shared = torch.zeros(4)
        self.parts = nn.ModuleDict({kind: Part(kind) for kind in ("counter", "view", "whole", "dense", "write batch")})
        self.parts["write and return"] = Part("write and return")
        self.parts["updating"], self.parts["reader"] = (
            Part("updating", shared),
            Part("reader", shared[: pick.randint(1, 4)]),
        )
        self.norm = nn.BatchNorm1d(1, affine=False)
        self.register_buffer("offset", torch.zeros(4))
        self.register_buffer("written", torch.zeros(4))
        self.register_buffer("part", self.written[:2])
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("variance", torch.ones(4))
        self.row = self.parts["dense"].linear.weight.detach()[0]
        self.plain = torch.zeros(4)
        self.tables = nn.ModuleList()
        self.program: list[tuple[str, tuple[int, int], int]] = [("field", (0, 0), pick.randrange(6))]
        for _ in range(pick.randint(4, 14)):
            what = pick.choice(_PURE + _HIDDEN * (seed % 2))
            self.program.append((what, self.two(pick), pick.randrange(6)))
        self.program.append(("table", self.two(pick), 0))
        self.tables.extend(Table(i, log) for i in range(sum(what == "table" for what, _, _ in self.program)))

    def two(self, pick: random.Random) -> tuple[int, int]:
        return pick.randrange(len(self.program)), pick.randrange(len(self.program))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        values: list[Any] = []
        tables = iter(self.tables)
        for what, (first, second), detail in self.program:
            x, y = (values[first], values[second]) if values else (batch.a, batch.b)
            values.append(self.step(batch, what, x, y, detail, tables))
        output = sum(values)
        return (output * output).sum().reshape(1), output.detach()

    def step(self, batch: Batch, what: str, x: Any, y: Any, detail: int, tables: Any) -> Any:
        if what == "field":
            return (
                lambda: batch.a,
                lambda: batch.b,
                lambda: batch.named["x"],
                lambda: batch.named["y"],
                lambda: batch.listed[0],
                lambda: batch.a[1:2].expand(4),
            )[detail]()
        if what == "table":
            forms: tuple[Any, ...] = ((x,), (x, y), ([x, (y,)],), (batch.named["y"], x), (batch.listed[0],), (x + 1,))
            return next(tables)(*forms[detail])
        if what == "whole":
            return self.parts["whole"](batch)
        if what == "write batch":
            return self.parts[what](x, batch, y, detail)
        if what in self.parts:
            return self.parts[what](x)
        return self.change(batch, what, x, y, detail)

    def change(self, batch: Batch, what: str, x: Any, y: Any, detail: int) -> Any:
        if what == "write buffer":
            self.written.add_(1)
        elif what == "write plain":
            self.plain += 1
        elif what == "in place":
            (x if detail % 2 else x[1:]).add_(0.25)
        elif what == "replace" and detail % 2:
            batch.a = y
        elif what == "replace":
            batch.named["x"] = y
        return {
            "add": lambda: x * 0.5 - y,
            "cat": lambda: torch.cat([x[2:], y[:2]]),
            "buffer": lambda: x + self.offset,
            "constant": lambda: torch.maximum(x, torch.ones(4) * 0.25),
            "norm": lambda: self.norm(x.reshape(4, 1)).reshape(4),
            "read update": lambda: self.parts["reader"](x),
            "read part": lambda: x + self.part[0],
            "read plain": lambda: x + self.plain * 2,
            "running": lambda: self.normalized(x) + x,
            "read running": lambda: x + self.mean,
            "read counter": lambda: x + self.parts["counter"].tensor,
            "read weight": lambda: x + self.row,
        }.get(what, lambda: y)()

    def normalized(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x.reshape(1, 4).expand(2, 4), self.mean, self.variance, training=True)[0]


def plain_outputs(model: Model, optimizer: torch.optim.Optimizer, batches: list[Batch]) -> list[torch.Tensor] | None:
    """None where a plain loop fails, or ends in numbers that tell nothing."""
    outputs = []
    for batch in batches:
        optimizer.zero_grad()
        try:
            losses, output = model(batch)
            losses.sum(0).backward()
        except RuntimeError:  # autograd's, of what was written in place
            return None
        optimizer.step()
        outputs.append(output)
    return outputs if all(bool(part.isfinite().all()) for part in (*outputs, *state_of(model))) else None


def state_of(model: Model) -> list[torch.Tensor]:
    return [*model.state_dict().values(), model.plain, model.row]


def check(seed: int) -> None:
    logs: list[list[tuple[str, int]]] = [[], []]
    model, plain = (Model(seed, log) for log in logs)
    optimizer, plain_optimizer = (torch.optim.SGD(each.parameters(), lr=1e-3) for each in (model, plain))
    batches, others = ([Batch(1000 * seed + i) for i in range(19)] for _ in range(2))
    expected = plain_outputs(plain, plain_optimizer, others)
    if expected is None:
        return
    pipeline = TrainPipelineSparseDist(model, optimizer, "cpu")
    lines = pipeline.explain().splitlines()
    names = [f"tables.{i}" for i in range(len(model.tables))]
    assert [line.partition(":")[0] for line in lines] == names
    iterator = iter(batches)
    for index, output in enumerate(expected):
        logs[0].clear()
        try:
            assert torch.equal(pipeline.progress(iterator), output), index
        except RuntimeError as error:
            if seed % 2 and any(why in str(error) for why in _ERRORS):
                return
            raise
        if index == 2:
            for name, line in zip(names, lines, strict=True):
                calls = [what for what, number in logs[0] if f"tables.{number}" == name]
                assert calls == (["use", "dist"] if line.endswith(": pipelined") else ["dist", "use"]), line
    assert all(map(torch.equal, state_of(model), state_of(plain)))


@pytest.mark.filterwarnings("ignore")
def test_what_is_said_of_a_model_is_so_and_no_number_is_another():
    first = random.randrange(1 << 20)
    for seed in range(first, first + _CASES):
        print(f"seed {seed}")
        check(seed)
