"""An embedding that the last stage uses, too: its gradients are those of one weight, in every schedule."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from farandole.pipelining import (
    PipelineStage,
    TiedWeights,
    get_schedule_class,
    plan,
    schedule_names,
)
from pipelining.pipeline_support import BACKENDS
from support.devices import DEVICE, ON_CPU, seeded
from support.processes import run_ranks

_WIDTH, _WORDS = 4, 7


class First(nn.Module):
    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight
        self.inner = nn.Linear(_WIDTH, _WIDTH, dtype=torch.double)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(nn.functional.embedding(words, self.weight)))


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(_WIDTH, _WIDTH, dtype=torch.double)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


class Last(Middle):
    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.weight.t()


def _stages(count: int, first: nn.Parameter, last: nn.Parameter) -> list[nn.Module]:
    torch.manual_seed(2)
    return [First(first), *(Middle() for _ in range(count - 2)), Last(last)]


def _weight(seed: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(_WORDS, _WIDTH, generator=seeded(seed), dtype=torch.double))


def _loss(output: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, words)


def _train(rank: int, world_size: int) -> list[str]:
    ran = []
    count = 6
    words, target = torch.randint(0, _WORDS, (2, 24), generator=seeded(5))
    for name in schedule_names():
        per_rank = 1 if name in ("none", "GPipe", "1F1B", "ZB-H1", "ZB-H2") else 2
        if name in ("none", "DualPipe"):  # one rank; two models
            continue
        num_stages = per_rank * world_size
        owners = plan(name, num_stages, count, num_ranks=world_size).rank_of_stage
        is_local = owners[0] == owners[-1]
        first, last = _weight(0), _weight(1)  # the copy of the last stage begins with other values
        stages = _stages(num_stages, first, first if is_local else last)
        alone = _stages(num_stages, shared := _weight(0), shared)
        tied = None
        ends = dist.new_group([owners[0], owners[-1]]) if not is_local else None
        if ends is not None and rank in (owners[0], owners[-1]):
            tied = TiedWeights([first if rank == owners[0] else last], ends)
        mine = [PipelineStage(stages[i], i, num_stages, DEVICE) for i, owner in enumerate(owners) if owner == rank]
        schedule = get_schedule_class(name)(mine if per_rank > 1 else mine[0], count, _loss)
        args = (words,) if rank == owners[0] else ()
        kwargs = {"target": target} if rank == owners[-1] else {}
        for _ in range(2):
            schedule.step(*args, **kwargs)
        for x, y in zip(words.tensor_split(count) * 2, target.tensor_split(count) * 2):
            for stage in alone:
                x = stage(x)
            (_loss(x, y) / count).backward()
        if tied is not None:
            tied.sum_gradients()
        for i in (i for i, owner in enumerate(owners) if owner == rank):
            for ours, one in zip(stages[i].parameters(), alone[i].parameters(), strict=True):
                assert ours.grad is not None and one.grad is not None
                assert torch.allclose(ours.grad, one.grad, rtol=1e-9, atol=1e-12), (name, i)
        ran.append(name)
    return ran


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_a_tied_weight_are_those_of_one_weight_in_every_schedule(backend):
    names = run_ranks(_train, 2, backend)[0]
    assert len(names) == len(schedule_names()) - 2


def _several(rank: int, world_size: int) -> None:
    weights = [nn.Parameter(torch.full((2, 3), float(rank))), nn.Parameter(torch.full((4,), rank, dtype=torch.double))]
    tied = TiedWeights(weights, dist.group.WORLD, source=1)
    assert all(torch.equal(weight, torch.ones_like(weight)) for weight in weights)
    if rank == 0:
        weights[0].grad = torch.full((2, 3), 5.0)
    weights[1].grad = torch.full((4,), rank + 1.0, dtype=torch.double)
    tied.sum_gradients()
    assert torch.equal(weights[0].grad, torch.full((2, 3), 5.0))
    assert torch.equal(weights[1].grad, torch.full((4,), 6.0, dtype=torch.double))
    with pytest.raises(
        ValueError, match=r"parameters of rank 2 of the group are \[\(\(3,\), 'torch.float32'\)\], expec"
    ):
        TiedWeights([nn.Parameter(torch.ones(3 if rank == 2 else 2))], dist.group.WORLD)
    with pytest.raises(ValueError, match="source is 3, expected a rank of the group: 0 to 2"):
        TiedWeights([], dist.group.WORLD, source=3)


def _wrapped(rank: int, world_size: int) -> None:
    own = [dist.new_group([other]) for other in range(world_size)][rank]
    for options in ({}, {"grad_reduce_in_fp32": True}):
        torch.manual_seed(rank)
        model = DistributedDataParallel(nn.Linear(3, 2, bias=False), process_group=own, **options)
        weight = model.module.weight
        tied = TiedWeights([weight], dist.group.WORLD)
        optimizer = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model)
        before = weight.detach().clone()
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.full((1, 3), rank + 1.0)).sum().backward()
            tied.sum_gradients()
            optimizer.step()
        torch.testing.assert_close(weight.detach(), before - 2 * 3.0)
    sharded = DistributedDataParallel(nn.Linear(3, 2), process_group=own, use_distributed_optimizer=rank == 1)
    tied = TiedWeights(list(sharded.module.parameters()), dist.group.WORLD)
    sharded(torch.ones(1, 3)).sum().backward()
    with pytest.raises(ValueError, match=r"of rank 1 of the group are in \['part of main_grad', .*: expected whole"):
        tied.sum_gradients()


def _move(rank: int, world_size: int) -> None:
    weight = nn.Parameter(torch.ones(3))
    tied = TiedWeights([weight], dist.group.WORLD)
    weight.grad = torch.ones(3)
    tied.sum_gradients()
    if rank == 1:
        weight.main_grad = torch.ones(3)
    told = r"are in \['main_grad'\], expected" if rank == 1 else "of another rank are not in"
    error = pytest.raises(RuntimeError, match=rf"gradients {told} \['grad'\] as in the first call")
    # Of a GPU the others do not look at what came: they would wait for it.
    with error if ON_CPU or rank == 1 else contextlib.nullcontext():
        tied.sum_gradients()


def test_gradients_that_have_moved_are_an_error_on_every_rank():
    run_ranks(_move, 2, "farandole")


def test_gradients_are_summed_where_a_wrapper_keeps_them():
    run_ranks(_wrapped, 2, "farandole")


def test_copies_begin_equal_and_a_missing_gradient_counts_as_zeros():
    run_ranks(_several, 3, "farandole")
