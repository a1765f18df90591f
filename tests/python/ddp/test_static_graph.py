"""static_graph, as an argument and said later, against torch's over gloo."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS
from torch.nn.parallel import DistributedDataParallel as TorchDdp
from torch.utils.checkpoint import checkpoint

from farandole import megatron
from farandole.ddp import DistributedDataParallel
from support.devices import backend_for
from support.processes import run_ranks


class _Shared(torch.nn.Module):
    """One layer in two reentrant checkpoints: its parameters get two gradients in a backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.layer, self.head, self.spare = (torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return self.head(x).square().mean()


def _input(rank: int, step: int) -> torch.Tensor:
    return torch.full((2, 4), 1.0 + rank + step, requires_grad=True)


def _train(theirs: TorchDdp, ours: Any, rank: int, steps: int = 4) -> None:
    for step in range(steps):
        for model in (theirs, ours):
            model.zero_grad()
            model(_input(rank, step)).backward()
        for (name, want), got in zip(theirs.named_parameters(), ours.parameters(), strict=True):
            if name.startswith("module.spare"):
                assert want.grad is None or not want.grad.any()
                assert got.grad is None
            else:
                torch.testing.assert_close(got.grad, want.grad, msg=f"step {step} rank {rank} {name}")


def _argument(rank: int, world_size: int) -> None:
    gloo = dist.new_group(backend=backend_for("gloo"))
    theirs = TorchDdp(_Shared(), process_group=gloo, static_graph=True)
    _train(theirs, DistributedDataParallel(_Shared(), static_graph=True), rank)


def test_a_static_graph_may_use_a_parameter_in_several_checkpoints():
    run_ranks(_argument, 2, BACKENDS[-1], timeout=60)


def _later(rank: int, world_size: int) -> None:
    gloo = dist.new_group(backend=backend_for("gloo"))
    for options in ({}, {"bucket_size": "auto"}, {"overlap_grad_reduce": False}, {"bucket_size": 10}):
        theirs, ours = TorchDdp(_Shared(), process_group=gloo), DistributedDataParallel(_Shared(), **options)
        for model in (theirs, ours):
            model._set_static_graph()
        assert ours.static_graph
        _train(theirs, copy.deepcopy(ours), rank)  # which is one of a static graph, too
        _train(TorchDdp(_Shared(), process_group=gloo, static_graph=True), ours, rank, steps=8)
        with pytest.warns(UserWarning, match="static_graph is True already"):
            ours._set_static_graph()


def test_a_graph_may_be_said_to_be_static_before_the_first_backward():
    run_ranks(_later, 2, BACKENDS[-1], timeout=60)


def _too_late(rank: int, world_size: int) -> None:
    module = torch.nn.Linear(4, 4)
    model = DistributedDataParallel(module)
    with model.no_sync():
        model(torch.ones(1, 4)).sum().backward()  # reduces nothing
    model(torch.ones(1, 4)).sum().backward()
    with pytest.raises(RuntimeError, match="static_graph after gradients were reduced: expected before the first"):
        model._set_static_graph()
    assert not model.static_graph
    told = DistributedDataParallel(torch.nn.Linear(4, 4), unused_parameters="error")
    with pytest.raises(ValueError, match="static_graph=True means unused_parameters='skip', not 'error'"):
        told._set_static_graph()
    told(torch.ones(1, 4)).sum().backward()  # goes on as it is
    if rank == 0:  # said by one rank alone: an error, on both, which says how they differ
        told = DistributedDataParallel(torch.nn.Linear(4, 4))
        told._set_static_graph()
    else:
        told = DistributedDataParallel(torch.nn.Linear(4, 4))
    with pytest.raises(
        ValueError, match=r"rank . called all_reduce of \d+ bytes .*, rank . .* called all_reduce of \d+ bytes"
    ):
        told(torch.ones(1, 4)).sum().backward()


def test_a_graph_is_not_said_to_be_static_too_late_or_by_one_rank():
    run_ranks(_too_late, 2, BACKENDS[-1], timeout=60)


def _megatrons(rank: int, world_size: int) -> None:
    megatron.parallel_state.initialize_model_parallel()
    config = megatron.DistributedDataParallelConfig(overlap_grad_reduce=True)
    module = _Shared()
    module.spare.requires_grad_(False)
    model = megatron.DistributedDataParallel(SimpleNamespace(), config, module)
    model._set_static_graph()
    for step in range(3):
        model.zero_grad_buffer()
        model(_input(rank, step)).backward()
        model.finish_grad_sync()
        want = torch.zeros(4, 4)
        for each in range(world_size):
            alone = _Shared()
            alone(_input(each, step)).backward()
            want += alone.layer.weight.grad / world_size
        torch.testing.assert_close(module.layer.weight.main_grad, want, msg=f"step {step}")


def test_megatrons_wrapper_takes_several_gradients_of_a_parameter_too():
    run_ranks(_megatrons, 2, BACKENDS[-1], timeout=60)
