"""Models whose wrappers are not the outermost modules, and that are called with other things than the batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from farandole.ddp import DistributedDataParallel as OurDdp
from farandole.sparse import TrainPipelineBase, TrainPipelineSparseDist
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import (
    Batch,
    Mean,
    Recommender,
    ShardedTables,
    assert_same,
    drain,
    made,
    make_batches,
    plain_loop,
    wrapped,
)


class Task(nn.Module):
    """As a trainer has it: the model is one of its modules, next to what it does with the losses."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        losses, output = self.inner(batch)
        return losses * self.scale, output


class Asking(ShardedTables):
    """Whether torch.compile traces its lookups."""

    is_traced = False

    def compute_and_output_dist(self, context: dict[str, Any], ids: torch.Tensor) -> torch.Tensor:
        self.is_traced = torch.compiler.is_compiling()
        return super().compute_and_output_dist(context, ids)


def recommender() -> Recommender:
    model = Recommender(1, tables=2)
    for table in model.tables:
        table.__class__ = Asking
    return model


def of_ours(model: nn.Module) -> nn.Module:
    inner = wrapped(model)
    return OurDdp(inner.module)


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(wrapped(model), backend="eager")


WRAPPERS = {"torch's DDP": wrapped, "farandole's DDP": of_ours, "compiled": compiled}


def wrap_inside(rank: int, world_size: int, how: str, is_hooked: bool) -> None:
    # A compiled model is compared with one that is not: torch 2.11 makes other gradients of exchanges that it traces.
    model, plain = (Task(WRAPPERS[kind](recommender())) for kind in (how, how.replace("compiled", "torch's DDP")))
    for each in (model, plain) if is_hooked else ():
        each.inner.register_forward_pre_hook(shifted)
    optimizer, plain_optimizer = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, tracing="fx", strict=True)
    batches = make_batches(3, 6)
    assert all(map(torch.equal, drain(pipeline, iter(batches)), plain_loop(plain, plain_optimizer, batches)))
    assert_same(model, plain)
    assert pipeline.explain().count(": pipelined") == 2
    # What comes ahead is not for torch.compile, whose graphs know nothing of the pipeline's streams.
    assert [module.is_traced for module in model.modules() if isinstance(module, Asking)] == [False] * 2
    pipeline.detach()
    assert how == "compiled" or all("forward" not in vars(module) for module in model.modules())


def shifted(_: nn.Module, args: tuple[Batch]) -> tuple[Batch]:
    [batch] = args
    return (Batch(batch.ids + 3, batch.dense, batch.labels),)


@pytest.mark.parametrize("is_hooked", [False, True])
@pytest.mark.parametrize("how", WRAPPERS)
def test_wrappers_inside_of_a_model_are_looked_through(how, is_hooked):
    if how == "compiled" and is_hooked:
        pytest.skip("torch.compile takes no hooks")
    run_ranks(wrap_inside, 2, "farandole", timeout=90, how=how, is_hooked=is_hooked)


class WithPosts(Recommender):
    """Its ids go through a module, twice."""

    class Shift(nn.Module):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return ids + 1

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.shift = self.Shift()

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        ids = self.shift(self.shift(batch.ids))
        return self.score(torch.cat([self.tables[0](ids), batch.dense + ids.sum(0).unsqueeze(1)], 1), batch.labels)


def hook_posts(rank: int, world_size: int, threads: bool) -> None:
    (model, optimizer), (plain, plain_optimizer) = made(WithPosts(1)), made(WithPosts(1))
    for each in (model, plain):
        each.module.shift.register_forward_pre_hook(lambda _, args: (args[0] * 3,))
        each.module.shift.register_forward_hook(lambda _, args, ids: ids * 2)
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, strict=True, load_on_thread=threads)
    batches = make_batches(3, 6)
    assert all(map(torch.equal, drain(pipeline, iter(batches)), plain_loop(plain, plain_optimizer, batches)))
    assert_same(model, plain)


@pytest.mark.parametrize("threads", [False, True])
def test_hooks_on_post_processing_may_change_what_it_gets_and_returns(threads):
    run_ranks(hook_posts, 2, "farandole", threads=threads)


class Summing(WithPosts):
    class Shift(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("total", torch.zeros((), dtype=torch.int64))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            self.total += ids.sum()
            return ids + self.total % 7


def broadcast(rank: int, world_size: int) -> None:
    """Of the first rank's sums, once all have gone ahead with their own."""
    model, optimizer = made(Summing(1))
    model.eval()  # no backward, for which ranks would wait
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    if rank == 0:
        assert pipeline.progress(iter(make_batches(3, 2))) is not None
        return
    with pytest.raises(RuntimeError, match=r"^buffers of 'shift', which runs ahead of forwards, are overwritten"):
        pipeline.progress(iter(make_batches(3, 2)))


def test_buffers_that_ddp_overwrites_behind_what_went_ahead_are_an_error():
    run_ranks(broadcast, 2, "farandole")


def give_parts(rank: int, world_size: int) -> None:
    (model, optimizer), (plain, plain_optimizer) = made(1), made(1)
    batches = make_batches(3, 6)
    options: Any = {"custom_model_fwd": lambda batch: model(batch[0])}
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, **options)
    expected = r"from a batch, which is a tuple: .* where custom_model_fwd gives it something else, .*tracing=\"hooks\""
    with pytest.raises(TypeError, match=expected):
        pipeline.progress(iter([(batch, "a name") for batch in batches]))
    pipeline.detach()
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, tracing="hooks", **options)
    outputs = drain(pipeline, iter([(batch, "a name") for batch in batches]))
    assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, batches)))
    assert ": pipelined" in pipeline.explain()
    pipeline.detach()
    options = {"custom_model_fwd": lambda batch: model(Batch(batch.ids + 1, batch.dense, batch.labels))}
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, **options)
    with pytest.raises(RuntimeError, match=r"tables\.0 is called with other inputs .* where custom_model_fwd gives it"):
        pipeline.progress(iter(batches))


def test_a_forward_of_ones_own_that_gives_the_model_something_else_is_told_so():
    run_ranks(give_parts, 2, "farandole")


@pytest.mark.parametrize(
    ("device", "kind", "match"),
    [
        ("cuda:99", ValueError, r"^device='cuda:99': expected \"cpu\", or what torch finds here: \d+ of cuda"),
        ("meta", ValueError, r"^device='meta': expected \"cpu\", or what torch finds here: 0 of meta"),
        ("nope", ValueError, r"^device='nope': expected a torch.device, or its name"),
        (None, TypeError, r"^device=None: expected a torch.device, or its name"),
    ],
)
def test_a_device_that_is_not_there_is_refused_by_name(device, kind, match):
    model = Mean()
    with pytest.raises(kind, match=match):
        TrainPipelineBase(model, torch.optim.SGD(model.parameters()), device)
