"""Recommenders with sharded tables, of torch alone and of torchrec; batches; and the plain loop to compare with."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from support.devices import DEVICE, ON_CPU

ROWS, WIDTH, DENSE = 50, 8, 4
_MOST_STEPS = 1000


@dataclass
class Batch:
    ids: torch.Tensor  # tables x samples
    dense: torch.Tensor
    labels: torch.Tensor


class Request:
    """An awaitable."""

    def __init__(self, wait: Callable[[], Any]) -> None:
        self.wait = wait


class AllToAll(torch.autograd.Function):
    """Rows by rank, to and from each."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        ctx.splits = received, sent
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return AllToAll.apply(grad, *ctx.splits), None, None


class ShardedTables(nn.Module):
    """As many tables as ranks, each on one of them; what a train pipeline needs, without torchrec."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1000 * seed + dist.get_rank())
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH, generator=generator, device="cpu").to(DEVICE))
        self.input_group = dist.new_group()
        self.before_dist: Callable[[], None] = lambda: None
        self.before_data: Callable[[], None] = lambda: None
        self.before_arrival: Callable[[int], None] = lambda number: None  # of the input_dist
        self.input_dists = 0

    def create_context(self) -> dict[str, Any]:
        return {}

    def input_dist(self, context: dict[str, Any], ids: torch.Tensor, offset: int = 0) -> Request:
        number, self.input_dists = self.input_dists, self.input_dists + 1
        self.before_dist()
        ids = ids + offset
        world = dist.get_world_size()
        sizes = torch.empty(world, dtype=torch.int64, device=ids.device)
        mine = torch.full((world,), ids.shape[1], device=ids.device)
        work = dist.all_to_all_single(sizes, mine, group=self.input_group, async_op=True)

        def exchange() -> Request:
            work.wait()
            self.before_data()
            context["local"], context["from"] = ids.shape[1], sizes.tolist()
            received = torch.empty(int(sizes.sum()), dtype=torch.int64, device=ids.device)
            splits = context["from"], [ids.shape[1]] * world
            sent = dist.all_to_all_single(received, ids.contiguous().flatten(), *splits, self.input_group, True)

            def arrive() -> torch.Tensor:
                sent.wait()
                self.before_arrival(number)
                return received

            return Request(arrive)

        return Request(exchange)

    def compute_and_output_dist(self, context: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
        rows = self.table[ids % ROWS]
        world, local = dist.get_world_size(), context["local"]
        out = AllToAll.apply(rows, context["from"], [local] * world)
        return out.view(world, local, WIDTH).transpose(0, 1).reshape(local, world * WIDTH)

    def forward(self, ids: torch.Tensor, offset: int = 0) -> torch.Tensor:
        context = self.create_context()
        return self.compute_and_output_dist(context, self.input_dist(context, ids, offset).wait().wait())


class Recommender(nn.Module):
    """Returns losses by sample, and the scores."""

    def __init__(self, seed: int, tables: int = 1, dropout: float = 0.0) -> None:
        super().__init__()
        self.tables = nn.ModuleList(ShardedTables(seed + i) for i in range(tables))
        torch.manual_seed(seed)
        width = tables * dist.get_world_size() * WIDTH + DENSE
        self.dense = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))
        self.before_forward: Callable[[], None] = lambda: None

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        rows = [table(batch.ids, offset=i) for i, table in enumerate(self.tables)]
        return self.score(torch.cat([*rows, batch.dense], 1), batch.labels)

    def score(self, features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.dense(features).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(scores, labels, reduction="none"), scores.detach()


class Mean(torch.nn.Module):
    """Of batches that are plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (self.weight * batch).reshape(-1), batch


def make_batches(seed: int, number: int, sizes: tuple[int, int] = (1, 9)) -> list[Batch]:
    """Different ones on each rank, in its host's memory."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    batches = []
    for _ in range(number):
        size = int(torch.randint(*sizes, (), generator=generator, device="cpu"))
        ids = torch.randint(0, ROWS, (dist.get_world_size(), size), generator=generator, device="cpu")
        dense = torch.randn(size, DENSE, generator=generator, device="cpu")
        labels = torch.randint(0, 2, (size,), generator=generator, device="cpu").float()
        batches.append(Batch(ids, dense, labels))
    return batches


def on_device(batch: Any) -> Any:
    """Where the model is, with all that it holds; what is there already as it is."""
    if isinstance(batch, torch.Tensor):
        return batch.to(DEVICE)
    if isinstance(batch, (list, tuple)):
        return type(batch)(map(on_device, batch))
    if ON_CPU or not isinstance(batch, Batch):
        return batch
    moved = copy.copy(batch)
    vars(moved).update({name: on_device(part) for name, part in vars(batch).items()})
    return moved


def are_same(batches: Sequence[Batch], others: Sequence[Batch]) -> bool:
    """The very same, where no device has copies of them."""
    if ON_CPU:
        return [id(batch.dense) for batch in batches] == [id(other.dense) for other in others]
    dense, expected = ([batch.dense.cpu() for batch in of] for of in (batches, others))
    return len(dense) == len(expected) and all(map(torch.equal, dense, expected))


def wrapped(model: nn.Module) -> nn.Module:
    """Its dense part in torch's DDP."""
    tables = [name for name, _ in model.named_parameters() if name.startswith("tables")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, tables)
    return DistributedDataParallel(model)


def made(
    model: nn.Module | int = 0, kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD, lr: float = 0.5
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model, or the Recommender of this seed, with its dense part in torch's DDP; and its optimizer."""
    model = wrapped(Recommender(model) if isinstance(model, int) else model)
    return model, kind([part for part in model.parameters() if part.requires_grad], lr=lr)


def plain_loop(
    model: Any, optimizer: torch.optim.Optimizer, batches: Sequence[Any], grad_accum: int = 1
) -> list[torch.Tensor]:
    """What a pipeline must do, batch after batch; a window that is cut short steps with what it has."""
    outputs = []
    for index, batch in enumerate(batches):
        is_last = index % grad_accum == grad_accum - 1 or index == len(batches) - 1
        if index % grad_accum == 0:
            optimizer.zero_grad()
        wrapper = getattr(model, "_dmp_wrapped_module", model)
        has_sync = is_last or not hasattr(wrapper, "no_sync")
        if getattr(wrapper, "static_graph", False) and not hasattr(wrapper, "has_begun"):
            wrapper.has_begun = has_sync = True  # torch's DDP cannot do without
        with contextlib.nullcontext() if has_sync else wrapper.no_sync():
            losses, output = model(on_device(batch))
            if grad_accum > 1:
                losses = losses / grad_accum
            torch.sum(losses, dim=0).backward()
        if is_last:
            optimizer.step()
        outputs.append(output)
    return outputs


def is_exact() -> bool:
    """Whether sums of gradients have all their bits: NCCL adds up more than two ranks by places in its buffers, and a
    window that is cut short has others."""
    return ON_CPU or dist.get_world_size() <= 2


def is_same(value: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.equal(value, expected) if is_exact() else torch.allclose(value, expected, rtol=1e-4, atol=1e-5)


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, value), (_, expected) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert is_same(value, expected), name


def drain(pipeline: Any, batches: Iterator[Any]) -> list[Any]:
    """The outputs until the data ends."""
    outputs = []
    while True:
        try:
            outputs.append(pipeline.progress(batches))
        except StopIteration:
            return outputs


class Trouble(Exception):
    pass


class Loader:
    """Goes on after an error, as a DataLoader does."""

    def __init__(self, batches: list[Any], fails: set[int]) -> None:
        self._batches = enumerate(batches)
        self._fails = fails

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        index, batch = next(self._batches)
        if index in self._fails:
            raise Trouble(f"cannot read batch {index}")
        return batch


def drain_with_errors(pipeline: Any, batches: Iterator[Any]) -> list[Any]:
    seen: list[Any] = []
    while True:
        assert len(seen) < _MOST_STEPS, seen[-1]  # as that of a pipeline that is over, in each call
        try:
            seen.append(pipeline.progress(batches))
        except StopIteration:
            return seen
        except (Trouble, RuntimeError, AttributeError) as error:
            seen.append(error)
