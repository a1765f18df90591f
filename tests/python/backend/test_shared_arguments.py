"""Arguments of a collective that share memory: what comes is what arguments apart get, copied to its places in turn."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.processes import run_ranks

pytestmark = only_on_cpu("NCCL's arguments are apart")
ROOT = 1
CPU = torch.device("cpu")


def _all_gather(outputs: Any, inputs: Any, rank: int) -> None:
    dist.all_gather(outputs, inputs[rank])


def _all_gather_into_tensor(output: Any, inputs: Any, rank: int) -> None:
    dist.all_gather_into_tensor(output, inputs[rank])


def _gather(outputs: Any, inputs: Any, rank: int) -> None:
    dist.gather(inputs[rank], outputs if rank == ROOT else None, dst=ROOT)


def _scatter(outputs: Any, inputs: Any, rank: int) -> None:
    dist.scatter(outputs[0], inputs if rank == ROOT else None, src=ROOT)


def _reduce_scatter(outputs: Any, inputs: Any, rank: int) -> None:
    dist.reduce_scatter(outputs[0], inputs)


def _reduce_scatter_tensor(outputs: Any, input_: Any, rank: int) -> None:
    dist.reduce_scatter_tensor(outputs[0], input_)


def _all_to_all(outputs: Any, inputs: Any, rank: int) -> None:
    dist.all_to_all(outputs, inputs)


def _all_to_all_single(output: Any, input_: Any, rank: int) -> None:
    dist.all_to_all_single(output, input_)


def _all_gather_coalesced(outputs: Any, inputs: Any, rank: int) -> None:
    half = len(outputs) // 2
    lists = [list(pair) for pair in zip(outputs[:half], outputs[half:], strict=True)]
    dist.group.WORLD.allgather_coalesced(lists, inputs[:2]).wait()


def _reduce_scatter_coalesced(outputs: Any, inputs: Any, rank: int) -> None:
    dist.group.WORLD.reduce_scatter_tensor_coalesced(outputs, inputs).wait()


# How many outputs and inputs there are, and how many parts each has: N for as many as ranks.
N = 0
OPERATIONS: dict[Callable[..., None], tuple[int, int, int, int]] = {
    _all_gather: (N, 1, N, 1),
    _all_gather_into_tensor: (1, N, N, 1),
    _gather: (N, 1, N, 1),
    _scatter: (1, 1, N, 1),
    _reduce_scatter: (1, 1, N, 1),
    _reduce_scatter_tensor: (1, 1, 1, N),
    _all_to_all: (N, 1, N, 1),
    _all_to_all_single: (1, N, 1, N),
    _all_gather_coalesced: (-2, 1, N, 1),
    _reduce_scatter_coalesced: (2, 1, 2, N),
}


def _views(memory: torch.Tensor, rng: random.Random, numel: int, count: int) -> list[torch.Tensor]:
    """Each anywhere in it."""
    begins = [rng.randint(0, len(memory) - numel) for _ in range(count)]
    return [memory[begin : begin + numel] for begin in begins]


def _single(operation: Any, tensors: list[torch.Tensor], is_input: bool) -> Any:
    flat = (_all_to_all_single, _reduce_scatter_tensor) if is_input else (_all_gather_into_tensor, _all_to_all_single)
    return tensors[0] if operation in flat else tensors


def _compare(rank: int, world_size: int, of_seeds: list[int]) -> None:
    for seed in of_seeds:
        common, mine = random.Random(seed), random.Random(1000 * seed + rank)  # each rank's overlaps are its own
        for operation, counts in OPERATIONS.items():
            outputs_count, output_parts, inputs_count, input_parts = (
                world_size if count == N else count * -world_size if count < 0 else count for count in counts
            )
            numel = common.choice([1, 3, 700, 9000, 70_000])
            room = numel * world_size + common.randint(0, 2 * numel)
            memory = torch.rand(room, generator=torch.Generator().manual_seed(10 * seed + rank))
            outputs = _views(memory, mine, numel * output_parts, outputs_count)
            inputs = _views(memory, mine, numel * input_parts, inputs_count)
            if operation in (_reduce_scatter_coalesced, _all_gather_coalesced):  # outputs apart: they are not copied
                apart = torch.rand(numel * outputs_count)
                memory = torch.cat([apart, memory])
                shift = mine.choice([0, numel])
                outputs = list(memory[: numel * outputs_count].split(numel))
                inputs = [memory[shift : shift + each.numel()] for each in inputs]
            if operation is _gather and rank != ROOT:
                outputs = []
            copies = [tensor.clone() for tensor in outputs]
            operation(_single(operation, copies, False), _single(operation, [*map(torch.clone, inputs)], True), rank)
            want = memory.clone()
            for to, value in zip(outputs, copies, strict=True):
                want[to.storage_offset() : to.storage_offset() + to.numel()] = value
            operation(_single(operation, outputs, False), _single(operation, inputs, True), rank)
            assert torch.equal(memory, want), f"seed {seed}, {operation.__name__}, {numel} elements"


@pytest.mark.parametrize("world_size", [2, 3])
def test_shared_memory_changes_no_result(world_size):
    first = random.SystemRandom().randrange(10**6)
    run_ranks(_compare, world_size, "farandole", of_seeds=list(range(first, first + 5)))


LISTS: list[Callable[[torch.Tensor], list[torch.Tensor]]] = [
    lambda y: [y[:3], y[1:]],
    lambda y: [y, y[2:4]],
    lambda y: [y, y],
    lambda y: [y, y.view(2, 3)],
    lambda y: [y[:2], y[4:]],
    lambda y: [y[3:], y[:4], y[3:]],
]


def _coalesced(rank: int, world_size: int) -> None:
    gloo = dist.new_group(backend="gloo")
    for lists in LISTS:
        want = torch.arange(6.0) + rank
        dist.all_reduce_coalesced(lists(want), group=gloo)
        y = torch.arange(6.0) + rank
        dist.all_reduce_coalesced(lists(y))
        assert torch.equal(y, want), (y, want)
        y = torch.arange(6.0) + rank
        with dist._coalescing_manager(device=CPU):
            for part in lists(y):
                dist.all_reduce(part)
        assert torch.equal(y, want), (y, want)
        y = torch.arange(6.0) + rank
        options = dist.AllreduceCoalescedOptions()
        options.reduceOp = dist._make_nccl_premul_sum(0.5)
        dist.group.WORLD._get_backend(CPU).allreduce_coalesced(lists(y), options).wait()
        for got, whole, alone in zip(lists(y), lists(want), lists(torch.arange(6.0) + rank), strict=True):
            assert torch.equal(got, torch.where(whole == alone, got, whole / 2)), (y, want)


def test_tensors_that_overlap_are_reduced_once():
    run_ranks(_coalesced, 2, "farandole")
