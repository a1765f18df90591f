"""What goes wrong with a batch reaches the caller for that batch, on all ranks; the others are trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from farandole.sparse import TrainPipelineBase, TrainPipelineSparseDist
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import (
    Batch,
    Loader,
    Mean,
    Recommender,
    ShardedTables,
    Trouble,
    assert_same,
    drain,
    drain_with_errors,
    made,
    make_batches,
    plain_loop,
)


class CannotMove(Batch):
    def to(self, device: torch.device, non_blocking: bool = False) -> CannotMove:
        raise Trouble("cannot copy")


def fail_on_one(rank: int, world_size: int, where: str, threads: bool | None) -> None:
    """Batches 2 and 3 fail on rank 1 before their forward."""
    (model, optimizer), (plain, plain_optimizer) = made(), made()
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, load_on_thread=threads, dist_on_thread=threads)
    batches = make_batches(1, 7)
    fed: list[Any] = list(batches)
    fails = {2, 3} if rank == 1 else set()
    for index in fails:
        if where == "copy":
            fed[index] = CannotMove(**vars(batches[index]))
    seen = drain_with_errors(pipeline, Loader(fed, fails if where == "load" else set()))
    assert len(seen) == 7
    for index in (2, 3):
        if rank == 1:
            assert isinstance(seen[index], Trouble)
        else:
            assert isinstance(seen[index], RuntimeError)
            assert "rank 1" in str(seen[index]) and "failed on others" in str(seen[index])
            if where == "load":
                assert f"Trouble: cannot read batch {index}" in str(seen[index])
    trained = [*batches[:2], *batches[4:]]
    expected_outputs = plain_loop(plain, plain_optimizer, trained)
    assert all(map(torch.equal, [*seen[:2], *seen[4:]], expected_outputs))
    assert_same(model, plain)
    name = pipeline._attachment.input_dist._joint.exchange._name
    store = dist.distributed_c10d._get_default_store()
    dist.barrier()
    assert not any(store.check([f"{name}/{number}/1"]) for number in range(20)), "reasons are left in the store"


@pytest.mark.sample(4)
@pytest.mark.parametrize("threads", [False, True, None])
@pytest.mark.parametrize("where", ["load", "copy"])
def test_a_batch_that_fails_on_one_rank_is_skipped_on_all(where, threads):
    run_ranks(fail_on_one, 2, "farandole", where=where, threads=threads)


class Interrupted(Loader):
    def __next__(self) -> Any:
        try:
            return super().__next__()
        except Trouble:
            raise KeyboardInterrupt from None


def interrupt(rank: int, world_size: int, threads: bool) -> None:
    """Ctrl-C while rank 1 loads batch 3: beside batch 1, after which it comes out."""
    (model, optimizer), (plain, plain_optimizer) = made(), made()
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, load_on_thread=threads)
    batches = make_batches(1, 7)
    loader = Interrupted(batches, {3} if rank == 1 else set())
    seen: list[Any] = []
    for _ in range(7):
        try:
            seen.append(pipeline.progress(loader))
        except (KeyboardInterrupt, RuntimeError) as error:
            seen.append(error)
    expected = plain_loop(plain, plain_optimizer, [*batches[:3], *batches[4:]])
    assert_same(model, plain)
    if rank == 1:
        assert isinstance(seen[1], KeyboardInterrupt)
        assert "load was interrupted by KeyboardInterrupt" in str(seen[3])
        del expected[1], seen[1]
        del seen[2]
    else:
        assert "rank 1, load of batch 3: interrupted by KeyboardInterrupt" in str(seen.pop(3))
    assert all(map(torch.equal, seen, expected))


@pytest.mark.parametrize("threads", [False, True])
def test_an_interrupt_in_a_load_does_not_wait_for_the_turn_of_its_batch(threads):
    run_ranks(interrupt, 2, "farandole", threads=threads)


def interrupt_first(rank: int, world_size: int) -> None:
    """What interrupts the load of the first batch comes out at once, in place of that batch's error."""
    (model, optimizer), (plain, plain_optimizer) = made(), made()
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    batches = make_batches(1, 4)
    loader = Interrupted(batches, {0} if rank == 1 else set())
    with pytest.raises(KeyboardInterrupt if rank == 1 else RuntimeError):
        pipeline.progress(loader)
    outputs = drain(pipeline, loader)
    assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, batches[1:])))
    assert_same(model, plain)


def test_an_interrupt_in_the_first_load():
    run_ranks(interrupt_first, 2, "farandole")


@pytest.mark.parametrize("on_thread", [False, True])
def test_a_loader_runs_as_on_the_thread_of_its_caller(on_thread):
    states = []

    def batches() -> Iterator[torch.Tensor]:
        while True:
            states.append((torch.get_default_device().type, torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            yield torch.ones(2, device="cpu")

    model = Mean().to(DEVICE).eval()
    pipeline = TrainPipelineBase(model, torch.optim.SGD(model.parameters(), lr=0.1), DEVICE, load_on_thread=on_thread)
    iterator = batches()
    for device, grad, inference in [("meta", True, False), ("cpu", False, False), ("cpu", False, True)]:
        with torch.device(device), torch.inference_mode(inference), torch.set_grad_enabled(grad):
            pipeline.progress(iterator)
            states.clear()
            pipeline.progress(iterator)
            assert states == [(device, grad, inference)]


def fail_with_a_name(rank: int, world_size: int) -> None:
    """Of a file, in bytes that are no text."""
    (model, optimizer), (plain, plain_optimizer) = made(), made()
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    batches = make_batches(1, 4)

    class Files(Loader):
        def __next__(self) -> Any:
            try:
                return super().__next__()
            except Trouble:
                raise RuntimeError("day\udcff.parquet is truncated") from None

    seen = drain_with_errors(pipeline, Files(batches, {2} if rank == 1 else set()))
    told = str(seen.pop(2))
    assert told.endswith("day\udcff.parquet is truncated" if rank == 1 else r"day\udcff.parquet is truncated")
    assert rank == 1 or "rank 1, load of batch 2: RuntimeError: day" in told
    assert all(map(torch.equal, seen, plain_loop(plain, plain_optimizer, [*batches[:2], batches[3]])))


def test_a_reason_may_hold_what_is_no_text():
    run_ranks(fail_with_a_name, 2, "farandole")


def fail_in_inputs(rank: int, world_size: int, threads: bool | None) -> None:
    (model, optimizer), (plain, plain_optimizer) = made(), made()
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, load_on_thread=threads, dist_on_thread=threads)
    batches = make_batches(1, 5)
    fed: list[Any] = list(batches)
    if rank == 0:
        fed[0] = fed[3] = (torch.zeros(2),)  # has no ids
    seen = drain_with_errors(pipeline, iter(fed))
    for index in (0, 3):
        assert isinstance(seen[index], AttributeError if rank == 0 else RuntimeError)
        assert "ids" in str(seen[index]) and (rank == 0 or "rank 0" in str(seen[index]))
    expected = plain_loop(plain, plain_optimizer, [batches[1], batches[2], batches[4]])
    assert all(map(torch.equal, [seen[1], seen[2], seen[4]], expected))
    assert_same(model, plain)


@pytest.mark.parametrize("threads", [False, True])
def test_so_is_one_whose_inputs_cannot_be_made(threads):
    run_ranks(fail_in_inputs, 2, "farandole", threads=threads)


def fail_in_compute(rank: int, world_size: int, where: str, threads: bool | None) -> None:
    """On all ranks; the batches after it are trained."""
    (model, optimizer), (plain, plain_optimizer) = made(), made()
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, load_on_thread=threads, dist_on_thread=threads)
    batches = make_batches(1, 6)
    calls = iter(range(100))

    def fail_at_second(*_: Any) -> None:
        if next(calls) == 1:
            raise Trouble(where)

    inner = model.module
    if where == "forward":
        inner.dense.register_forward_pre_hook(fail_at_second)
    elif where == "backward":
        inner.dense[0].register_full_backward_pre_hook(fail_at_second)
    elif where == "step":
        optimizer.register_step_pre_hook(fail_at_second)
    else:
        inner.tables[0].before_dist = fail_at_second
    seen = drain_with_errors(pipeline, iter(batches))
    assert isinstance(seen[1], Trouble) and str(seen[1]) == where
    assert len(seen) == 6 and not any(isinstance(output, Exception) for output in [seen[0], *seen[2:]])
    expected = plain_loop(plain, plain_optimizer, [batches[0], *batches[2:]])
    assert all(map(torch.equal, [seen[0], *seen[2:]], expected))
    assert_same(model, plain)


@pytest.mark.sample(4)
@pytest.mark.parametrize("threads", [False, True])
@pytest.mark.parametrize("where", ["input_dist", "forward", "step"])
def test_a_failure_on_all_ranks_leaves_a_pipeline_that_goes_on(where, threads):
    run_ranks(fail_in_compute, 2, "farandole", where=where, threads=threads)


def fail_in_window(rank: int, world_size: int, where: str) -> None:
    """The window is over; the next batch begins one, with zeroed gradients."""
    model, plain = Recommender(2), Recommender(2)
    optimizer, plain_optimizer = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain))
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, grad_accum=2)
    batches = make_batches(1, 8)
    calls = iter(range(100))

    def fail_at_fourth(*_: Any) -> None:
        if next(calls) == 3:
            raise Trouble(where)

    if where == "backward":
        model.dense[0].register_full_backward_pre_hook(fail_at_fourth)
        fails = 3
    else:
        optimizer.register_step_pre_hook(fail_at_fourth)
        fails = 7
    seen = drain_with_errors(pipeline, iter(batches))
    assert [index for index, output in enumerate(seen) if isinstance(output, Trouble)] == [fails]
    if where == "backward":  # batches 2 and 3 are lost
        plain_loop(plain, plain_optimizer, [*batches[:2], *batches[4:]], 2)
    else:
        plain_loop(plain, plain_optimizer, batches[:6], 2)
    assert_same(model, plain)


@pytest.mark.parametrize("where", ["backward", "step"])
def test_a_failure_ends_its_window(where):
    run_ranks(fail_in_window, 2, "farandole", where=where)


def fail_before_the_end(rank: int, world_size: int) -> None:
    """A forward that fails leaves a window that the end of the data still averages."""
    (model, optimizer), (plain, plain_optimizer) = made(), made()
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, grad_accum=2)
    batches = make_batches(1, 2)
    calls = iter(range(100))

    def fail_at_second(*_: Any) -> None:
        if next(calls) == 1:
            raise Trouble("forward")

    model.module.dense.register_forward_pre_hook(fail_at_second)
    seen = drain_with_errors(pipeline, iter(batches))
    assert isinstance(seen[1], Trouble)
    plain_loop(plain, plain_optimizer, [batches[0]], 2)
    assert_same(model, plain)


def test_a_window_is_averaged_after_a_failure():
    run_ranks(fail_before_the_end, 2, "farandole")


class Either(torch.nn.Module):
    """Each rank uses another one of its layers, in turns."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 1) for _ in range(3))

    def forward(self, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.layers[int(batch[0, 0])](batch)
        return scores.flatten(), scores.detach()


def use_others(rank: int, world_size: int) -> None:
    models = [DistributedDataParallel(Either(), find_unused_parameters=True) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in models]
    batches = [torch.full((2, 2), float(rank)), torch.full((2, 2), float(rank)), torch.full((2, 2), float(rank))]
    drain(TrainPipelineBase(models[0], optimizers[0], DEVICE, grad_accum=2), iter(batches))
    plain_loop(models[1], optimizers[1], batches, 2)
    assert_same(models[0], models[1])


def test_ranks_that_used_different_parameters_average_the_same_ones():
    run_ranks(use_others, 2, "farandole")


class Files(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 4:
            raise Trouble("file 4 is broken")
        return torch.ones(2)


def test_an_error_of_a_loaders_worker_reaches_the_caller():
    model = Mean().to(DEVICE)
    pipeline = TrainPipelineBase(model, torch.optim.SGD(model.parameters(), lr=0.1), DEVICE)
    seen = drain_with_errors(pipeline, iter(DataLoader(Files(), num_workers=1)))
    assert isinstance(seen[4], Trouble) and "file 4 is broken" in str(seen[4])
    assert len(seen) == 6


def refuse(rank: int, world_size: int) -> None:
    model, optimizer = made()
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    batches = make_batches(1, 3)
    with pytest.raises(TypeError, match=r"expected? an iterator.*list|iterator, got a list"):
        pipeline.progress(batches)
    with pytest.raises(TypeError, match=r"a batch holds a object.*has no to\(\)"):
        pipeline.progress(iter([object()]))
    drain(pipeline, iter(batches))
    table = model.module.tables[0]
    table.forward = ShardedTables.forward.__get__(table)
    with pytest.raises(RuntimeError, match=r"tables\.0 has changed under its pipeline.*detach\(\)"):
        pipeline.progress(iter(batches))
    linear = torch.nn.Linear(2, 2).to(DEVICE)
    its_own = torch.optim.SGD(linear.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"Linear has no sharded module.*TrainPipelineBase"):
        TrainPipelineSparseDist(linear, its_own, DEVICE).progress(iter(batches))
    for wrong, error in [(0, ValueError), (-2, ValueError), (1.5, TypeError), (True, TypeError), ("2", TypeError)]:
        with pytest.raises(error, match=r"grad_accum=.*expected an int above 0"):
            TrainPipelineSparseDist(model, optimizer, DEVICE, grad_accum=wrong)
    with pytest.raises(TypeError, match="model is a int"):
        TrainPipelineSparseDist(3, optimizer, DEVICE)
    with pytest.raises(ValueError, match=r"enable_amp=torch\.float64"):
        TrainPipelineSparseDist(model, optimizer, DEVICE, enable_amp=torch.float64)
    base = TrainPipelineBase(linear, its_own, DEVICE)
    with pytest.raises(TypeError, match=r"the model returned a Tensor: expected \(losses, output\)"):
        base.progress(iter([torch.ones(2, 2)]))
    for wrong, match in [
        ({"optimizer": None}, r"^optimizer is a NoneType: expected a torch\.optim\.Optimizer"),
        ({"process_group": 3}, r"^process_group=3: expected a torch\.distributed\.ProcessGroup, or None"),
        ({"load_on_thread": 3}, r"^load_on_thread=3: expected a bool, or None"),
        ({"dist_on_thread": "yes"}, r"^dist_on_thread='yes': expected a bool, or None"),
        ({"strict": None}, r"^strict=None: expected a bool"),
        ({"agree_on_inputs": 1}, r"^agree_on_inputs=1: expected a bool"),
    ]:
        with pytest.raises(TypeError, match=match):
            TrainPipelineSparseDist(**({"model": model, "optimizer": optimizer, "device": DEVICE} | wrong))
    flat = TrainPipelineBase(linear, its_own, DEVICE, custom_model_fwd=lambda batch: (linear(batch), batch))
    with pytest.raises(ValueError, match=r"^the model returned losses of shape \(3, 2\): expected one for each sample"):
        flat.progress(iter([torch.ones(3, 2)]))


def test_refuses_by_name():
    run_ranks(refuse, 2, "farandole")
