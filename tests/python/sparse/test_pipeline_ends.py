"""Where the data ends: few batches, ranks with different numbers of them, iterators that follow each other."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

from farandole.sparse import TrainPipelineBase, TrainPipelineSparseDist
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import Mean, are_same, assert_same, drain, made, make_batches, on_device, plain_loop


def end_together(rank: int, world_size: int, seed: int, threads: bool | None) -> None:
    pick = random.Random(seed)
    (model, optimizer), (plain, plain_optimizer) = made(seed), made(seed)
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, load_on_thread=threads, dist_on_thread=threads)
    for epoch in range(5):
        numbers = [pick.randint(0, 6) for _ in range(world_size)]
        print(f"seed {seed}, epoch {epoch}: {numbers} batches")
        batches = make_batches(seed + epoch, numbers[rank])
        iterator = iter(batches)
        outputs = drain(pipeline, iterator)
        fewest = min(numbers)
        expected = plain_loop(plain, plain_optimizer, batches[:fewest])
        assert len(outputs) == fewest and all(map(torch.equal, outputs, expected))
        # Nothing is lost: what was taken and not trained is there, the rest is still in the iterator.
        left = [*pipeline.unused_batches, *iterator]
        assert are_same(left, batches[fewest:])
        with pytest.raises(StopIteration):
            pipeline.progress(iterator)
    assert_same(model, plain)


@pytest.mark.sample(3)
@pytest.mark.parametrize("threads", [False, True, None])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_with_different_numbers_of_batches_end_together(world_size, threads):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    run_ranks(end_together, world_size, "farandole", timeout=90, seed=seed, threads=threads)


def carry_over(rank: int, world_size: int, seed: int) -> None:
    """Without executing all batches the last two of an iterator go on with the next one."""
    pick = random.Random(seed)
    (model, optimizer), (plain, plain_optimizer) = made(seed), made(seed)
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, execute_all_batches=False, grad_accum=2)
    batches, outputs = [], []
    for epoch in range(6):
        number = pick.randint(0, 4)
        print(f"seed {seed}, epoch {epoch}: {number} batches")
        more = make_batches(seed + epoch, number)
        batches += more
        outputs += drain(pipeline, iter(more))
        assert len(outputs) == max(0, len(batches) - 2) and pipeline.in_flight == min(2, len(batches))
    trained = len(outputs) - len(outputs) % 2  # a window that is open goes on, too
    expected = plain_loop(plain, plain_optimizer, batches[:trained], 2)
    assert all(map(torch.equal, outputs, expected))
    assert_same(model, plain)


def test_the_last_two_batches_wait_for_the_next_iterator_where_not_all_are_executed():
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    run_ranks(carry_over, 2, "farandole", seed=seed)


def stop_together(rank: int, world_size: int) -> None:
    model, optimizer = made()
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE, execute_all_batches=False)
    assert len(drain(pipeline, iter(make_batches(0, 5 + rank)))) == 3
    assert pipeline.in_flight == (2 if rank == 0 else 3)


def test_ranks_stop_together_where_not_all_batches_are_executed():
    run_ranks(stop_together, 3, "farandole")


def follow_iterators(rank: int, world_size: int) -> None:
    """An iterator for each call, as wrappers of pipelines do it."""
    (model, optimizer), (plain, plain_optimizer) = made(), made()
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    batches = make_batches(1, 7)
    outputs = [pipeline.progress(iter([batch])) for batch in batches[:4]]
    outputs.append(pipeline.progress(iter(batches[4:6])))
    outputs.append(pipeline.progress(iter(batches[6:])))
    outputs.append(pipeline.progress(iter([])))
    with pytest.raises(StopIteration):
        pipeline.progress(iter([]))
    assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, batches)))
    assert_same(model, plain)


def test_an_iterator_may_follow_before_the_one_before_has_ended():
    run_ranks(follow_iterators, 2, "farandole")


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((3,), float(index)), torch.tensor(float(index))


class Linear(torch.nn.Module):
    """Of batches that are lists of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 1)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        inputs, targets = batch
        return (self.linear(inputs).squeeze(1) - targets).square(), targets


def test_a_second_epoch_over_persistent_workers_has_all_batches():
    loader = DataLoader(Numbers(), batch_size=2, num_workers=2, persistent_workers=True)
    model = Linear().to(DEVICE)
    pipeline = TrainPipelineBase(model, torch.optim.SGD(model.parameters(), lr=0.0), DEVICE)
    for _ in range(3):
        outputs = drain(pipeline, iter(loader))
        assert torch.cat(outputs).tolist() == [float(index) for index in range(12)]


def test_none_is_no_batch_and_no_end():
    model = Mean().to(DEVICE)
    pipeline = TrainPipelineBase(model, torch.optim.SGD(model.parameters(), lr=0.1), DEVICE)
    ones = torch.ones(2, 3)
    batches = iter([ones, ones, None, ones])
    assert [pipeline.progress(batches) is not None for _ in range(2)] == [True, True]
    with pytest.raises(TypeError, match=r"the iterator gave None: .* torchrec's .* let the iterator end there"):
        pipeline.progress(batches)
    assert len(drain(pipeline, batches)) == 1


def test_batches_may_be_plain_tensors_and_false():
    model = Mean().to(DEVICE)
    pipeline = TrainPipelineBase(model, torch.optim.SGD(model.parameters(), lr=0.1), DEVICE)
    batches = [torch.zeros(()), torch.zeros(2), torch.zeros(1), torch.tensor([1.0, 2.0])]
    assert all(map(torch.equal, drain(pipeline, iter(batches)), map(on_device, batches)))


class Restarting:
    """Begins anew when it is asked again after its end, as the same object."""

    def __init__(self, epochs: list[list[Any]]) -> None:
        self._epochs = [iter(epoch) for epoch in epochs]

    def __iter__(self) -> Restarting:
        return self

    def __next__(self) -> Any:
        if not self._epochs:
            raise StopIteration
        try:
            return next(self._epochs[0])
        except StopIteration:
            del self._epochs[0]
            raise


def restart(rank: int, world_size: int, seed: int, threads: bool | None, execute_all_batches: bool) -> None:
    pick = random.Random(seed)
    (model, optimizer), (plain, plain_optimizer) = made(seed), made(seed)
    pipeline = TrainPipelineSparseDist(
        model, optimizer, DEVICE, execute_all_batches, load_on_thread=threads, dist_on_thread=threads
    )
    numbers = [pick.randint(0, 5) for _ in range(5)]
    print(f"seed {seed}: {numbers} batches")
    epochs = [make_batches(seed + epoch, number) for epoch, number in enumerate(numbers)]
    iterator = Restarting(epochs)
    if execute_all_batches:
        for epoch in epochs:
            outputs = drain(pipeline, iterator)
            expected = plain_loop(plain, plain_optimizer, epoch)
            assert len(outputs) == len(expected) and all(map(torch.equal, outputs, expected))
    else:
        outputs = [output for _ in epochs for output in drain(pipeline, iterator)]
        batches = [batch for epoch in epochs for batch in epoch]
        expected = plain_loop(plain, plain_optimizer, batches[: max(0, len(batches) - 2)])
        assert len(outputs) == len(expected) and all(map(torch.equal, outputs, expected))
    assert drain(pipeline, iterator) == []
    assert_same(model, plain)


@pytest.mark.sample(3)
@pytest.mark.parametrize("execute_all_batches", [True, False])
@pytest.mark.parametrize("threads", [False, True, None])
def test_an_iterator_may_begin_anew_as_the_same_object(threads, execute_all_batches):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    run_ranks(restart, 2, "farandole", seed=seed, threads=threads, execute_all_batches=execute_all_batches)


def restart_unevenly(rank: int, world_size: int) -> None:
    """A rank whose iterator has not ended goes on with what is left in it; all end together again."""
    (model, optimizer), (plain, plain_optimizer) = made(), made()
    pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    first, second = make_batches(1, 3 + 3 * rank), make_batches(2, 3)
    iterator = Restarting([first, second])
    outputs = drain(pipeline, iterator)
    unused = pipeline.unused_batches
    assert are_same(unused, first[3 : 3 + len(unused)])
    with_next = first[3 + len(unused) :] if rank == 1 else second
    fewest = torch.tensor([len(with_next)])
    dist.all_reduce(fewest, dist.ReduceOp.MIN)
    outputs += drain(pipeline, iterator)
    expected = plain_loop(plain, plain_optimizer, first[:3]) + plain_loop(plain, plain_optimizer, with_next[:fewest])
    assert len(outputs) == len(expected) and all(map(torch.equal, outputs, expected))
    assert_same(model, plain)
    # What was unused before is forgotten; what is now is still there when all have been asked again.
    left = pipeline.unused_batches
    assert are_same(left, with_next[fewest : fewest + len(left)])
    with pytest.raises(StopIteration):
        pipeline.progress(Restarting([]) if rank == 0 else iterator)
    if rank == 1:
        assert are_same(pipeline.unused_batches[: len(left)], left)


def test_ranks_that_begin_anew_unevenly_end_together():
    run_ranks(restart_unevenly, 2, "farandole")


def test_a_loader_that_has_ended_stays_so():
    loader = iter(DataLoader(Numbers(), batch_size=2, num_workers=1))
    model = Linear().to(DEVICE)
    pipeline = TrainPipelineBase(model, torch.optim.SGD(model.parameters(), lr=0.0), DEVICE)
    assert len(drain(pipeline, loader)) == 6
    assert drain(pipeline, loader) == []
