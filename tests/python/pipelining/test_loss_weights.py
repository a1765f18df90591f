"""Losses that are weighted by rows or tokens give the gradient of the mean over the whole batch, however it is split."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.ddp import DistributedDataParallel
from farandole.pipelining import PipelineStage, Schedule1F1B, ScheduleDualPipe, get_schedule_class, plan
from pipelining.pipeline_support import BACKENDS, assert_same_gradients, random_stages, train_alone
from support.devices import DEVICE
from support.processes import run_ranks

SINGLE = ["GPipe", "1F1B", "ZB-H1"]
MULTI = ["Interleaved1F1B", "InterleavedZeroBubble", "ZBV"]


def _stages(rank: int, name: str, modules: list[nn.Module], ranks: int, n_microbatches: int) -> Any:
    owners = plan(name, len(modules), n_microbatches, num_ranks=ranks).rank_of_stage
    mine = [PipelineStage(modules[i], i, len(modules), DEVICE) for i, owner in enumerate(owners) if owner == rank]
    return mine[0] if name in SINGLE else mine


def _whole_batch(modules: list[nn.Module], batch: torch.Tensor, target: torch.Tensor, loss_fn: Any) -> list[nn.Module]:
    fresh = copy.deepcopy(modules)
    for module in fresh:
        module.zero_grad()
    return train_alone(fresh, loss_fn, batch, target, 1)[0]


def _weight_by_rows(rank: int, world_size: int) -> None:
    for name in SINGLE + MULTI:
        modules = random_stages(random.Random(4), world_size if name in SINGLE else 2 * world_size, torch.float64)
        n = 4
        schedule = get_schedule_class(name)(_stages(rank, name, modules, world_size, n), n, nn.MSELoss())
        mine = schedule._stages
        for rows in (7, 7, 5, 8):  # of those the last are even
            batch = torch.randn(rows, modules[0][0].in_features, dtype=torch.float64)
            target = torch.randn_like(nn.Sequential(*modules)(batch).detach())
            weights: Any = [len(part) for part in batch.tensor_split(n)]
            if rows == 5:
                weights = torch.tensor(weights)
            for stage in mine:
                stage.submod.zero_grad()
            # Where no stage is a last one they are not looked at.
            schedule.step(batch, target=target, loss_weights=weights if any(stage.is_last for stage in mine) else "?")
            alone = _whole_batch(modules, batch, target, nn.MSELoss())
            for stage in mine:
                assert_same_gradients(stage.submod, alone[stage.stage_index], f"{name}, {rows} rows", tolerance=1e-12)
        # The next step counts all microbatches alike again.
        for stage in mine:
            stage.submod.zero_grad()
        schedule.step(batch, target=target)
        alone = _whole_batch(modules, batch, target, nn.MSELoss())
        for stage in mine:
            assert_same_gradients(stage.submod, alone[stage.stage_index], name, tolerance=1e-12)


def _mean_over_tokens(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-1)


def _weight_by_tokens(rank: int, world_size: int) -> None:
    torch.manual_seed(3)
    modules: list[nn.Module] = [nn.Embedding(11, 6), nn.Linear(6, 11)]
    modules = [module.double() for module in modules]
    batch, target = torch.randint(11, (9, 5)), torch.randint(11, (9, 5))
    target[torch.rand(9, 5) < 0.6] = -1  # padding
    target[0, 0] = 3
    target[6:] = -1  # no tokens at all in the last microbatch
    counts = [(part != -1).sum() for part in target.tensor_split(3)]
    alone = _whole_batch(modules, batch, target, _mean_over_tokens)

    def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return logits.sum() * 0 if (target == -1).all() else _mean_over_tokens(logits, target)

    stage = PipelineStage(modules[rank], rank, world_size, DEVICE)
    Schedule1F1B(stage, 3, loss_of).step(batch, target=target, loss_weights=counts)
    assert_same_gradients(modules[rank], alone[rank], "scaled", tolerance=1e-12)
    total = float(sum(counts))
    stage.submod.zero_grad()
    unscaled = Schedule1F1B(stage, 3, loss_of, scale_grads=False)
    unscaled.step(batch, target=target, loss_weights=[float(count) / total for count in counts])
    assert_same_gradients(modules[rank], alone[rank], "the weights themselves", tolerance=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_uneven_microbatches_weighted_by_rows_train_as_the_whole_batch(backend: str) -> None:
    run_ranks(_weight_by_rows, 2, backend)


def test_microbatches_weighted_by_tokens_train_as_the_whole_batch() -> None:
    run_ranks(_weight_by_tokens, 2, "gloo")


def _weight_two_copies(rank: int, world_size: int) -> None:
    """As ScheduleDualPipe says: the mean of both copies is the mean over the batch."""
    num_stages, n = 2 * world_size, 8
    modules = random_stages(random.Random(6), world_size, torch.float64)
    copies = modules + copy.deepcopy(modules)
    groups = [dist.new_group(sorted({stage, world_size - 1 - stage})) for stage in range(world_size)]
    mine = {}
    for stage in (rank, world_size - 1 - rank) if rank < world_size - 1 - rank else (world_size - 1 - rank, rank):
        index = stage if stage == rank else world_size + stage
        mine[index] = DistributedDataParallel(copies[index], process_group=groups[stage])
    stages = [PipelineStage(module, index, num_stages, DEVICE) for index, module in mine.items()]
    schedule = ScheduleDualPipe(stages, n, nn.MSELoss())
    batch = torch.randn(3 * n - 3, modules[0][0].in_features, dtype=torch.float64)  # the halves have 12 and 9 rows
    target = torch.randn_like(nn.Sequential(*modules)(batch).detach())
    alone = _whole_batch(modules, batch, target, nn.MSELoss())
    for _ in range(2):
        for module in mine.values():
            module.zero_grad()
        schedule.step(batch, target=target, loss_weights=[len(part) for part in batch.tensor_split(n)])
        for index in mine:
            assert_same_gradients(copies[index], alone[index % world_size], f"stage {index}", tolerance=1e-12)


def test_two_copies_weighted_by_rows_average_to_the_whole_batch() -> None:
    run_ranks(_weight_two_copies, 2, "gloo")


def _pass_bad_weights(rank: int, world_size: int) -> None:
    modules = random_stages(random.Random(4), world_size)
    schedule = Schedule1F1B(PipelineStage(modules[rank], rank, world_size, DEVICE), 3, nn.MSELoss())
    batch = torch.randn(6, modules[0][0].in_features)
    target = torch.randn_like(nn.Sequential(*modules)(batch).detach())
    for weights, kind, text in (
        ([1.0, 2.0], ValueError, "loss_weights has 2 entries, expected n_microbatches=3"),
        ([1.0, -2.0, 3.0], ValueError, r"loss_weights[1] is -2.0, expected a finite number of at least 0"),
        ([1.0, float("nan"), 3.0], ValueError, "loss_weights[1] is nan"),
        ([1.0, float("inf"), 3.0], ValueError, "loss_weights[1] is inf"),
        ([0, 0, 0], ValueError, "loss_weights have the sum 0.0, expected a positive one"),
        ([1.0, None, 3.0], TypeError, "loss_weights[1] is a NoneType, expected a number"),
        (torch.ones(3, 1), TypeError, "loss_weights[0] is a list, expected a number"),
        (3, TypeError, "loss_weights is a int, expected a list of n_microbatches=3"),
    ):
        with pytest.raises(kind if rank == 1 else RuntimeError) as raised:
            schedule.step(batch, target=target, loss_weights=weights)
        assert text in str(raised.value), raised.value
    schedule.step(batch, target=target, loss_weights=(1, 0, 2))
    forwards = Schedule1F1B(PipelineStage(modules[rank], rank, world_size, DEVICE), 3)
    with pytest.raises(ValueError if rank == 1 else RuntimeError, match="loss_weights was given, expected None"):
        forwards.step(batch, loss_weights=[1, 1, 1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_bad_weights_are_an_error_on_all_ranks(backend: str) -> None:
    run_ranks(_pass_bad_weights, 2, backend)
