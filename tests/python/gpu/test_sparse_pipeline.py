"""The sparse train pipeline with its streams: the plain loop's outputs and weights, also where a stream is late."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from farandole.sparse import PrefetchTrainPipelineSparseDist, TrainPipelineBase, TrainPipelineSparseDist
from support.gpus import needs_gpu, run_on_gpus
from support.recommenders import ROWS, Batch, Recommender, ShardedTables, drain, make_batches, plain_loop, wrapped

pytestmark = [needs_gpu, pytest.mark.timeout(300)]

LATE = 20_000_000  # cycles of the GPU: some milliseconds


class LateBatch(Batch):
    """Whoever does not wait for its copy reads something else."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        torch.cuda._sleep(LATE)
        parts = (getattr(self, field.name).pin_memory() for field in dataclasses.fields(self))
        return Batch(*(part.to(device, non_blocking=non_blocking) for part in parts))


def _late_input_dist(model: Any) -> None:
    for module in model.modules():
        if isinstance(module, ShardedTables):
            module.before_dist = lambda: torch.cuda._sleep(LATE)


def _made(seed: int, **options: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = wrapped(Recommender(seed, **options).cuda())
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def _compare(pipeline: Any, model: Any, batches: list[Any], plain: Any, plain_optimizer: Any, grad_accum: int) -> None:
    outputs = drain(pipeline, iter(batches))
    moved = [Batch(*(getattr(batch, field.name).cuda() for field in dataclasses.fields(batch))) for batch in batches]
    expected = plain_loop(plain, plain_optimizer, moved, grad_accum)
    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(list(model.parameters()), list(plain.parameters()))


def _train(rank: int, world_size: int, seed: int, is_late: bool) -> None:
    pick = random.Random(seed)
    device = torch.device("cuda", torch.cuda.current_device())
    for _ in range(3):
        grad_accum, tables, case = pick.choice([1, 2, 3]), pick.randint(1, 3), pick.randint(0, 1 << 30)
        print(f"seed {seed}: grad_accum {grad_accum}, {tables} tables, case {case}")
        (model, optimizer), (plain, plain_optimizer) = _made(case, tables=tables), _made(case, tables=tables)
        batches: list[Any] = make_batches(case, 8)
        if is_late:
            batches = [LateBatch(**vars(batch)) for batch in batches]
            _late_input_dist(model)
        pipeline = TrainPipelineSparseDist(model, optimizer, device, grad_accum=grad_accum, strict=True)
        _compare(pipeline, model, batches, plain, plain_optimizer, grad_accum)


@pytest.mark.parametrize("is_late", [False, True], ids=["at once", "late"])
def test_trains_as_the_plain_loop(world, is_late):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_on_gpus(_train, world, timeout=200, seed=seed, is_late=is_late)


def _train_base(rank: int, world_size: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    for on_thread in (False, True):
        (model, optimizer), (plain, plain_optimizer) = _made(3), _made(3)
        batches = [LateBatch(**vars(batch)) for batch in make_batches(1, 8)]
        pipeline = TrainPipelineBase(model, optimizer, device, grad_accum=2, load_on_thread=on_thread)
        _compare(pipeline, model, batches, plain, plain_optimizer, 2)


def test_copies_beside_the_forward(world):
    run_on_gpus(_train_base, world, timeout=200)


class _LateCache(ShardedTables):
    """Whoever does not wait for its prefetch reads other rows."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.locations: list[torch.Tensor] = []

    def prefetch(self, ctx: Any, dist_input: torch.Tensor, forward_stream: torch.cuda.Stream) -> None:
        assert torch.cuda.current_stream() != forward_stream
        torch.cuda._sleep(LATE)
        self.locations.append(dist_input % ROWS)
        self.locations[-1].record_stream(forward_stream)

    def compute_and_output_dist(self, context: Any, ids: torch.Tensor) -> torch.Tensor:
        return super().compute_and_output_dist(context, self.locations.pop(0) if self.locations else ids)


def _prefetch(rank: int, world_size: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    plain, plain_optimizer = _made(3)
    inner = Recommender(3)
    inner.tables = torch.nn.ModuleList([_LateCache(3)])
    model = wrapped(inner.cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    pipeline = PrefetchTrainPipelineSparseDist(model, optimizer, device, strict=True)
    _compare(pipeline, model, make_batches(1, 8), plain, plain_optimizer, 1)


def test_prefetches_on_a_stream_that_forwards_wait_for(world):
    run_on_gpus(_prefetch, world)


def _scaled(rank: int, world_size: int) -> None:
    """An overflow skips its step alone; scales are those of one scaler over whole windows."""
    device = torch.device("cuda", torch.cuda.current_device())
    model, optimizer = _made(5)
    scaler = torch.amp.GradScaler("cuda", init_scale=128.0)  # far from an overflow
    pipeline = TrainPipelineSparseDist(
        model, optimizer, device, grad_accum=2, enable_amp=torch.float16, grad_scaler=scaler
    )
    batches = make_batches(1, 8)
    batches[3].dense.fill_(float("inf"))
    weights = [[part.clone() for part in model.parameters()]]
    iterator = iter(batches)
    for index in range(8):
        pipeline.progress(iterator)
        if index % 2 == 1:
            weights.append([part.clone() for part in model.parameters()])
    same = [all(map(torch.equal, one, other)) for one, other in zip(weights, weights[1:], strict=False)]
    assert same == [False, True, False, False]
    assert scaler.get_scale() == 128.0 * scaler.get_backoff_factor()


def test_scales_by_windows(world):
    run_on_gpus(_scaled, world)
