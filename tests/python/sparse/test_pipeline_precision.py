"""Autocast around the forward, as a plain loop has it; and what cannot be scaled."""

from __future__ import annotations

import types
import warnings

import pytest
import torch

from farandole.sparse import TrainPipelineBase, TrainPipelineSparseDist
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import (
    Batch,
    Recommender,
    Trouble,
    assert_same,
    drain,
    drain_with_errors,
    make_batches,
    on_device,
    plain_loop,
    wrapped,
)


class Noting(Recommender):
    """Notes of what type its dense part is, and whether autocast is on in backward."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.seen: list[object] = []
        self.dense[0].register_forward_hook(lambda module, args, output: self.note(output))

    def note(self, output: torch.Tensor) -> None:
        self.seen.append(output.dtype)
        output.register_hook(lambda grad: self.seen.append(torch.is_autocast_enabled(DEVICE)))


def autocast(rank: int, world_size: int, enable_amp: bool | torch.dtype, dtype: torch.dtype, grad_accum: int) -> None:
    inner, plain_inner = Noting(2), Noting(2)
    model, plain = wrapped(inner), wrapped(plain_inner)
    optimizer, plain_optimizer = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain))
    pipeline = TrainPipelineSparseDist(
        model, optimizer, DEVICE, enable_amp=enable_amp, enable_grad_scaling=False, grad_accum=grad_accum
    )
    batches = make_batches(1, 4)
    outputs = drain(pipeline, iter(batches))
    for index, batch in enumerate(batches):
        is_last = index % grad_accum == grad_accum - 1
        if index % grad_accum == 0:
            plain_optimizer.zero_grad()
        plain.require_backward_grad_sync = is_last
        with torch.autocast(DEVICE, dtype=dtype, enabled=enable_amp is not False):
            losses, output = plain(on_device(batch))
        torch.sum(losses / grad_accum, dim=0).backward()
        if is_last:
            plain_optimizer.step()
        assert torch.equal(outputs[index], output)
    assert_same(model, plain)
    assert inner.seen == [dtype, False] * 4


@pytest.mark.sample(4)
@pytest.mark.parametrize("grad_accum", [1, 2])
@pytest.mark.parametrize(
    ("enable_amp", "dtype"),
    [(True, torch.bfloat16), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (False, torch.float32)],
)
def test_autocast_is_on_in_the_forward_alone(enable_amp, dtype, grad_accum):
    run_ranks(autocast, 2, "farandole", enable_amp=enable_amp, dtype=dtype, grad_accum=grad_accum)


class Mixing(Recommender):
    """Its ids are a matter of precision."""

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        product = batch.dense @ batch.dense.transpose(0, 1)
        ids = batch.ids + (1000 * product.diagonal()).long()
        return self.score(torch.cat([self.tables[0](ids), batch.dense], 1), batch.labels)


def mix(rank: int, world_size: int, threads: bool, is_callers: bool) -> None:
    model, plain = wrapped(Mixing(2)), wrapped(Mixing(2))
    optimizer, plain_optimizer = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain))
    options = {"load_on_thread": threads, "dist_on_thread": threads, "enable_grad_scaling": False}
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, enable_amp=not is_callers, strict=True, **options)
    batches = make_batches(1, 5)
    iterator, outputs = iter(batches), []
    for _ in batches:
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=is_callers):
            outputs.append(pipeline.progress(iterator))
    for output, batch in zip(outputs, batches, strict=True):
        plain_optimizer.zero_grad()
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            losses, expected = plain(on_device(batch))
        with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=is_callers):
            torch.sum(losses, dim=0).backward()
        plain_optimizer.step()
        assert torch.equal(output, expected), (output, expected)
    assert_same(model, plain)


@pytest.mark.sample(2)
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("is_callers", [False, True])
def test_inputs_are_computed_under_autocast_too(threads, is_callers):
    run_ranks(mix, 2, "farandole", threads=threads, is_callers=is_callers)


def test_without_cuda_there_is_a_warning_and_no_scaling():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="gradients are not scaled on cpu"):
        TrainPipelineBase(model, optimizer, "cpu", enable_amp=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TrainPipelineBase(model, optimizer, "cpu")
        TrainPipelineBase(model, optimizer, "cpu", enable_amp=True, enable_grad_scaling=False)
    for wrong in ("bfloat16", 1, None):
        with pytest.raises(TypeError, match="enable_amp="):
            TrainPipelineBase(model, optimizer, "cpu", enable_amp=wrong)


def overflow_on_one(rank: int, world_size: int, grad_accum: int) -> None:
    """Of nine batches the 2nd, 7th and last overflow, each on one rank, in a table that no other rank has."""
    bad = {1: 0, 6: world_size - 1, 8: 0}
    model, plain = wrapped(Recommender(2)), wrapped(Recommender(2))
    optimizer, plain_optimizer = (torch.optim.Adam(each.parameters(), lr=0.05) for each in (model, plain))
    norms: list[torch.Tensor] = []
    optimizer.register_step_pre_hook(
        lambda *_: norms.append(torch.nn.utils.clip_grad_norm_(model.module.dense.parameters(), 0.1))
    )
    numbers = iter(range(100))
    table = model.module.tables[0].table
    table.register_hook(lambda grad: grad * (float("inf") if bad.get(next(numbers)) == rank else 1))
    # Scales are powers of two, so that they change no bit of what is not tiny.
    scaler = torch.amp.GradScaler(DEVICE, init_scale=128.0, growth_interval=2)
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, grad_accum=grad_accum, grad_scaler=scaler)
    assert pipeline.grad_scaler is scaler
    batches = make_batches(1, 9)
    outputs = drain(pipeline, iter(batches))
    scale, steps, plain_norms = 128.0, 0, []
    for first in range(0, 9, grad_accum):
        window = range(first, min(first + grad_accum, 9))
        plain_optimizer.zero_grad()
        for index in window:
            plain.require_backward_grad_sync = index == window[-1]
            losses, output = plain(on_device(batches[index]))
            torch.sum(losses / grad_accum, dim=0).backward()
            assert torch.equal(outputs[index], output), index
        if bad.keys() & window:
            scale, steps = scale / 2, 0
            continue
        plain_norms.append(torch.nn.utils.clip_grad_norm_(plain.module.dense.parameters(), 0.1))
        plain_optimizer.step()
        steps += 1
        if steps % 2 == 0:
            scale *= 2
    assert norms == plain_norms
    assert scaler.get_scale() == scale
    assert_same(model, plain)


@pytest.mark.parametrize("grad_accum", [1, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_an_overflow_on_one_rank_skips_the_step_of_all(world_size, grad_accum):
    run_ranks(overflow_on_one, world_size, "farandole", grad_accum=grad_accum)


def overflow_elsewhere(rank: int, world_size: int) -> None:
    model = wrapped(Recommender(2))
    model.module.unused = torch.nn.Parameter(torch.ones(1))  # after DDP has looked
    parameters = [model.module.unused] if rank == 0 else model.module.tables.parameters()
    optimizer = torch.optim.SGD(parameters, lr=0.5)
    scaler = torch.amp.GradScaler(DEVICE, init_scale=128.0)
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, grad_scaler=scaler)
    batches = make_batches(1, 3)
    batches[1].dense[:] = float("inf")
    drain(pipeline, iter(batches))
    assert scaler.get_scale() == 64.0


def test_a_rank_without_gradients_takes_part():
    run_ranks(overflow_elsewhere, 2, "farandole")


def fail_in_a_scaled_step(rank: int, world_size: int) -> None:
    model, plain = wrapped(Recommender(2)), wrapped(Recommender(2))
    optimizer, plain_optimizer = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain))
    calls = iter(range(100))

    def fail_at_second(*_: object) -> None:
        if next(calls) == 1:
            raise Trouble("step")

    optimizer.register_step_pre_hook(fail_at_second)
    pipeline = TrainPipelineSparseDist(
        model, optimizer, DEVICE, grad_scaler=torch.amp.GradScaler(DEVICE, init_scale=128.0)
    )
    batches = make_batches(1, 4)
    seen = drain_with_errors(pipeline, iter(batches))
    assert isinstance(seen[1], Trouble)
    plain_loop(plain, plain_optimizer, [batches[0], *batches[2:]])
    assert_same(model, plain)


def test_a_step_that_fails_leaves_a_scaler_that_goes_on():
    run_ranks(fail_in_a_scaled_step, 2, "farandole")


def test_a_scaler_of_the_users_is_checked():
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"grad_scaler=3: expected a torch\.amp\.GradScaler, or None"):
        TrainPipelineBase(model, optimizer, "cpu", grad_scaler=3)
    with pytest.raises(ValueError, match=r"enable_grad_scaling=False with a grad_scaler"):
        TrainPipelineBase(model, optimizer, "cpu", grad_scaler=torch.amp.GradScaler("cpu"), enable_grad_scaling=False)
    off = TrainPipelineBase(model, optimizer, "cpu", grad_scaler=torch.amp.GradScaler("cpu", enabled=False))
    assert off.grad_scaler is None


def test_a_scaler_is_refused_wherever_an_optimizer_is_fused():
    linear, inner = torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2))
    model = torch.nn.Sequential(linear, inner)
    inner[0].fused_optimizer = types.SimpleNamespace(params={"table": None})
    options = {"optimizer": torch.optim.SGD(linear.parameters(), lr=0.1), "grad_scaler": torch.amp.GradScaler("cpu")}
    with pytest.raises(ValueError, match=r"^losses are scaled: .* would take scaled gradients \(that of 1\.0\)"):
        TrainPipelineBase(model, device="cpu", **options)
    inner[0].fused_optimizer.params.clear()
    TrainPipelineBase(model, device="cpu", **options)
