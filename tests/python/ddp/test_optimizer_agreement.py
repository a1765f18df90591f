"""What goes wrong with an optimizer on one rank is an error on all, at once and with its reason."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS
from optimizer_oracle import SmallModel, batch_of, groups_of

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from farandole.ddp._optimizer_state import FlatPart
from support.processes import run_ranks

SOON = 20  # seconds, of a group that waits for minutes


def _model(rank: int, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(SmallModel(2, torch.float32), use_distributed_optimizer=True, **options)


class _NeedsAClosure(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


def _constructor(rank: int, world_size: int) -> None:
    model = _model(rank)
    foreign = [torch.nn.Parameter(torch.zeros(3))] if rank == 1 else []
    start = time.monotonic()
    with pytest.raises(
        ValueError, match=r"a parameter of shape \(3,\)" if rank == 1 else r"rank 1: .*a parameter of shape \(3,\)"
    ):
        DistributedOptimizer(torch.optim.SGD([*model.parameters(), *foreign], lr=0.1), model)
    parameters = list(model.parameters())
    with pytest.raises(ValueError, match=r"rank 0 has optimizer: SGD; rank 2 has optimizer: AdamW"):
        kind = torch.optim.AdamW if rank == 2 else torch.optim.SGD
        DistributedOptimizer(kind(parameters, lr=0.1), model)
    with pytest.raises(ValueError, match=r"rank 0 has param group 0: .*; rank 1 has param group 0: "):
        DistributedOptimizer(torch.optim.SGD(parameters[1:] if rank == 1 else parameters, lr=0.1), model)
    settings = r"rank 0 has settings of param group 0: .*lr=0.1, .*; rank 1 has settings of param group 0: .*lr=0.2,"
    with pytest.raises(ValueError, match=settings):
        DistributedOptimizer(torch.optim.SGD(parameters, lr=0.2 if rank == 1 else 0.1, foreach=rank == 1), model)
    with pytest.raises(ValueError, match="rank 0 has is_elementwise: True; rank 2 has is_elementwise: False"):
        DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), model, is_elementwise=rank != 2)
    world = dist.group.WORLD if rank == 1 else None
    with pytest.raises(ValueError, match="model_parallel_group: None; rank 1 has model_parallel_group: of 3 ranks"):
        DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), model, model_parallel_group=world)
    with pytest.raises(
        ValueError, match=r"tensor_parallel_group='x': expected a ProcessGroup that this rank \(1\) is in"
    ):
        DistributedOptimizer(
            torch.optim.SGD(parameters, lr=0.1), model, tensor_parallel_group="x" if rank == 1 else None
        )
    for wrong, text in ((torch.nn.Tanh(), "model has a Tanh"), (model, "model has one .* several times")):
        with pytest.raises(ValueError if rank != 1 else (TypeError, ValueError), match=text):
            models = [model, wrong] if rank == 1 else model
            DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), models)
    with pytest.raises((TypeError, ValueError), match=r"optimizer is a _NeedsAClosure, whose step\(\) needs"):
        kind = _NeedsAClosure if rank == 2 else torch.optim.SGD
        DistributedOptimizer(kind(parameters, lr=0.1), model)
    assert time.monotonic() - start < SOON
    DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1, foreach=rank == 1), model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_optimizer_that_one_rank_refuses_is_refused_on_all(backend):
    run_ranks(_constructor, 3, backend, timeout=60)


def _groups(rank: int) -> dict[str, Any]:
    """Two instances of two ranks."""
    within = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    return {"process_group": within, "instance_process_group": across}


def _instances(rank: int, world_size: int) -> None:
    """One rank of one instance: its instance learns it first, then the other."""
    groups = _groups(rank)
    start = time.monotonic()
    with pytest.raises(ValueError, match="is a float8: expected gradients of another type"):
        module = torch.nn.Linear(2, 2, dtype=torch.float32)
        if rank == 3:
            module.weight = torch.nn.Parameter(module.weight.detach().to(torch.float8_e4m3fn))
        DistributedDataParallel(module, **groups)
    with pytest.raises(ValueError, match="the model must be the same on all ranks"):
        DistributedDataParallel(torch.nn.Linear(2, 3 if rank == 0 else 2), **groups)
    assert time.monotonic() - start < SOON
    model = _model(rank, **groups)
    with pytest.raises(ValueError, match="optimizer is a LBFGS, whose"):
        kind = torch.optim.LBFGS if rank == 2 else torch.optim.SGD
        DistributedOptimizer(kind(list(model.parameters()), lr=0.1), model)
    assert time.monotonic() - start < SOON
    DistributedOptimizer(torch.optim.SGD(list(model.parameters()), lr=0.1), model)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_one_instance_refuses_the_others_refuse(backend):
    run_ranks(_instances, 4, backend, timeout=60)


def _model_parallel(rank: int, world_size: int) -> None:
    """Two stages with two replicas each."""
    replicas = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    stages = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    model = _model(rank, process_group=replicas)
    start = time.monotonic()
    with pytest.raises(ValueError, match="which takes sparse gradients"):
        kind = torch.optim.SparseAdam if rank == 0 else torch.optim.Adam
        DistributedOptimizer(kind(list(model.parameters())), model, model_parallel_group=stages)
    assert time.monotonic() - start < SOON


def test_what_one_stage_refuses_the_others_refuse():
    run_ranks(_model_parallel, 4, BACKENDS[-1], timeout=60)


def _loading(rank: int, world_size: int) -> None:
    for make in (torch.optim.AdamW, torch.optim.Adafactor):
        model = _model(rank, bucket_size=300)
        optimizer = DistributedOptimizer(make(groups_of(model.module), lr=1e-2), model)

        def step(model: Any = model, optimizer: Any = optimizer) -> None:
            optimizer.zero_grad()
            model(batch_of(2, 0, rank, 0, model.module)).backward()
            optimizer.step()

        step()
        # Live tensors are not what is loaded.
        state = optimizer.full_state_dict()
        step()
        state["state"] = {name: dict(values) for name, values in state["state"].items()}
        name, key = next(
            (piece.name, key)
            for run in optimizer._runs
            for piece in run.pieces
            for key, value in optimizer.state_dict()["state"][piece.name].items()
            if isinstance(value, FlatPart)
        )
        if rank == 1:
            del state["state"][name][key]
        before = {piece: {**values} for piece, values in optimizer.full_state_dict()["state"].items()}
        reason = rf"state_dict has no '{key}' of parameter '{name}'" if rank == 1 else "rank 1: state_dict has no '"
        start = time.monotonic()
        with pytest.raises(ValueError, match=reason):
            optimizer.load_state_dict(state)
        assert time.monotonic() - start < SOON
        # Nothing was taken over, and training goes on.
        for piece, values in optimizer.full_state_dict()["state"].items():
            for one, value in values.items():
                assert torch.equal(value, before[piece][one]), (piece, one)
        step()


def _other_layout(rank: int, world_size: int) -> None:
    """State of another bucket size, in memory: a rank has not all that it owns now. What all have loads."""
    optimizers = []
    for bucket_size in (1, None):
        model = _model(rank, bucket_size=bucket_size)
        optimizer = DistributedOptimizer(torch.optim.AdamW(groups_of(model.module), lr=1e-2), model)
        optimizer.zero_grad()
        model(batch_of(2, 0, rank, 0, model.module)).backward()
        optimizer.step()
        optimizers.append(optimizer)
    first, second = optimizers
    start = time.monotonic()
    with pytest.raises(
        ValueError,
        match=r"state_dict has (nothing of parameter '.*, of which this rank owns|the elements \[.*which this rank owns)",
    ):
        second.load_state_dict(first.state_dict())
    assert time.monotonic() - start < SOON
    second.load_state_dict(first.full_state_dict())
    want, got = first.full_state_dict()["state"], second.full_state_dict()["state"]
    for name, values in want.items():
        for key, value in values.items():
            assert torch.equal(value, got[name][key]), (name, key)


@pytest.mark.parametrize("backend", BACKENDS)
def test_state_of_another_bucket_layout_is_refused_on_all_ranks_and_loads_when_it_is_full(backend):
    run_ranks(_other_layout, 2, backend, timeout=60)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_state_that_one_rank_cannot_load_is_loaded_by_none(backend):
    run_ranks(_loading, 2, backend, timeout=60)
