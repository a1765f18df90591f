"""The state of a distributed optimizer, saved and loaded: in memory, and through torch.distributed.checkpoint by other
numbers of ranks and other bucket sizes."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ddp_models import BACKENDS
from optimizer_oracle import OPTIMIZERS, Oracle, SmallModel, batch_of, groups_of

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from farandole.ddp._optimizer_state import FlatPart
from support.processes import run_ranks

BEFORE, AFTER = 5, 5


def _make(seed: int, bucket_size: int | None) -> tuple[DistributedDataParallel, DistributedOptimizer, Oracle]:
    rng = random.Random(seed)
    dtype = rng.choice([torch.float64, torch.bfloat16])
    make = rng.choice(OPTIMIZERS)
    in_fp32 = dtype == torch.bfloat16
    model = DistributedDataParallel(
        SmallModel(seed, dtype),
        bucket_size=bucket_size,
        use_distributed_optimizer=True,
        grad_reduce_in_fp32=in_fp32,
        overlap_param_gather=rng.random() < 0.5,
    )
    optimizer = DistributedOptimizer(make(groups_of(model.module)), model)
    return model, optimizer, Oracle(SmallModel(seed, dtype), make, torch.float32 if in_fp32 else dtype)


def _step(seed: int, step: int, replicas: int, model: Any, optimizer: Any) -> None:
    """The same batches whatever the number of ranks: each rank takes its share of four."""
    optimizer.zero_grad()
    share = [batch_of(seed, step, other, 0, model.module) for other in range(dist.get_rank(), 4, replicas)]
    for index, batch in enumerate(share):
        with model.no_sync() if index < len(share) - 1 else contextlib.nullcontext():
            (model(batch) / len(share)).backward()
    optimizer.step()


def _oracle_step(seed: int, step: int, oracle: Oracle) -> None:
    oracle.step([[batch_of(seed, step, other, 0, oracle.module)] for other in range(4)], None, 2.0)


def _save(rank: int, world_size: int, seed: int, folder: str) -> None:
    model, optimizer, _ = _make(seed, 300)
    for step in range(BEFORE):
        _step(seed, step, world_size, model, optimizer)
    model.start_param_sync(force_sync=True)
    dcp.save({"model": model.module.state_dict(), "optimizer": optimizer}, checkpoint_id=folder)


def _load(rank: int, world_size: int, seed: int, folder: str, bucket_size: int | None) -> None:
    model, optimizer, oracle = _make(seed, bucket_size)
    state = {"model": model.module.state_dict(), "optimizer": optimizer}
    dcp.load(state, checkpoint_id=folder)
    for step in range(BEFORE + AFTER):
        _oracle_step(seed, step, oracle)
    for step in range(BEFORE, BEFORE + AFTER):
        _step(seed, step, world_size, model, optimizer)
    model.start_param_sync(force_sync=True)
    oracle.check(model.module, f"seed {seed} rank {rank}")


@pytest.mark.parametrize(
    ("backend", "before", "after"),
    [("gloo", 2, 1), *((BACKENDS[-1], before, after) for before, after in [(2, 2), (1, 4), (4, 2)])],
)
def test_training_goes_on_from_a_checkpoint_of_another_number_of_ranks(backend, before, after, tmp_path: Path):
    seed = random.SystemRandom().randrange(10**6)
    print(f"seed {seed}")
    run_ranks(_save, before, backend, timeout=60, seed=seed, folder=str(tmp_path))
    for bucket_size in (1, None):
        run_ranks(_load, after, backend, timeout=60, seed=seed, folder=str(tmp_path), bucket_size=bucket_size)


def _in_memory(rank: int, world_size: int, seeds: list[int]) -> None:
    for seed in seeds:
        for whole in (False, True):
            model, optimizer, oracle = _make(seed, 300)
            for step in range(BEFORE):
                _step(seed, step, world_size, model, optimizer)
            model.start_param_sync(force_sync=True)
            other, into, _ = _make(seed, 1 if whole else 300)
            other.module.load_state_dict(model.module.state_dict())
            if whole:
                into.load_state_dict(optimizer.full_state_dict())
            else:
                into.load_state_dict(optimizer.state_dict())
            for step in range(BEFORE + AFTER):
                _oracle_step(seed, step, oracle)
            for step in range(BEFORE, BEFORE + AFTER):
                _step(seed, step, world_size, other, into)
            other.start_param_sync(force_sync=True)
            oracle.check(other.module, f"seed {seed} whole {whole} rank {rank}")


def test_state_is_loaded_in_memory_whole_or_in_parts():
    first = random.SystemRandom().randrange(10**6)
    print(f"seeds {first} to {first + 3}")
    run_ranks(_in_memory, 2, BACKENDS[-1], timeout=60, seeds=list(range(first, first + 4)))


def _asked_for(rank: int, world_size: int) -> None:
    """State that was made to be loaded into, and was not, leaves no trace: dampening takes the first gradient whole."""
    make = OPTIMIZERS[4]
    model = DistributedDataParallel(SmallModel(1, torch.float64), use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(make(groups_of(model.module)), model)
    oracle = Oracle(SmallModel(1, torch.float64), make, torch.float64)
    optimizer.state_dict()
    for step in range(3):
        _oracle_step(1, step, oracle)
        _step(1, step, world_size, model, optimizer)
    oracle.check(model.module, f"rank {rank}")


def test_asking_for_the_state_before_the_first_step_changes_nothing():
    run_ranks(_asked_for, 2, BACKENDS[-1], timeout=60)


def _refusals(rank: int, world_size: int) -> None:
    model, optimizer, _ = _make(5, 300)
    _step(5, 0, world_size, model, optimizer)
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="state_dict has 1 param groups: expected 2"):
        optimizer.load_state_dict({**state, "param_groups": state["param_groups"][:1]})
    name = next(iter(state["state"]))
    missing = {key: value for key, value in state["state"].items() if key != name}
    with pytest.raises(ValueError, match=f"state_dict has no '.*' of parameter '{name}'"):
        optimizer.load_state_dict({**state, "state": missing})
    groups = [dict(group, params=["x"]) for group in state["param_groups"]]
    with pytest.raises(ValueError, match=r"param group 0 has the parameters \['x'\]: expected \['mix'"):
        optimizer.load_state_dict({**state, "param_groups": groups})
    key, part = next((key, value) for key, value in state["state"][name].items() if isinstance(value, FlatPart))
    short = {
        **state["state"],
        name: {**state["state"][name], key: FlatPart(part.tensor[1:], part.begin + 1, part.whole)},
    }
    with pytest.raises(ValueError, match=r"which this rank owns\. Was it saved by another number of ranks"):
        optimizer.load_state_dict({**state, "state": short})


def test_state_that_does_not_fit_is_refused_by_name():
    run_ranks(_refusals, 2, "gloo", timeout=60)
