"""What a stage may be: several tensors, views, frozen parts, keyword arguments, kept inputs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from farandole.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from pipelining.pipeline_support import BACKENDS, assert_same_gradients, train_alone
from support.devices import DEVICE
from support.processes import run_ranks


class Fan(nn.Module):
    """One tensor to four: two that are used, an integer one, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor):
        y = self.linear(x)
        return y.t(), y * 2, (x > 0).long(), y.sum()


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, a: torch.Tensor, b: torch.Tensor, positive: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
        assert positive.dtype == torch.int64
        assert not positive.requires_grad
        return self.linear(a.t() * positive + b)


def _train_with_several_tensors(rank: int, world_size: int) -> None:
    torch.manual_seed(1)
    fan, join = Fan(), Join()
    batch, target = torch.randn(10, 6), torch.randn(10, 3)
    alone_fan, alone_join = Fan(), Join()
    alone_fan.load_state_dict(fan.state_dict())
    alone_join.load_state_dict(join.state_dict())
    for x, y in zip(batch.tensor_split(4), target.tensor_split(4), strict=True):
        (nn.functional.mse_loss(alone_join(*alone_fan(x)), y) / 4).backward()
    for schedule_class in (ScheduleGPipe, Schedule1F1B):
        stage = PipelineStage((fan, join)[rank], rank, world_size, DEVICE)
        schedule = schedule_class(stage, 4, nn.functional.mse_loss)
        for _ in range(2):
            stage.submod.zero_grad()
            schedule.step(batch, target=target)
            assert_same_gradients(stage.submod, (alone_fan, alone_join)[rank], schedule_class, tolerance=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_several_tensors_flow_between_stages(backend: str) -> None:
    run_ranks(_train_with_several_tensors, 2, backend)


class Double(torch.autograd.Function):
    """In Python, so that backward has to come back into the interpreter."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 + 0 * x


class Unusual(nn.Module):
    """Keeps its inputs, holds a Python autograd function, and returns a view that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept.append((x, x.detach().clone()))
        return Double.apply(self.linear(x)).t().contiguous().t()


def _train_unusual(rank: int, world_size: int) -> None:
    torch.manual_seed(2)
    stages: list[nn.Module] = [nn.Identity(), Unusual(), nn.Linear(5, 5).requires_grad_(False), Unusual()]
    batch, target = torch.randn(12, 5), torch.randn(12, 5)
    schedule = Schedule1F1B(PipelineStage(stages[rank], rank, world_size, DEVICE), 6, nn.MSELoss())
    for _ in range(3):
        stages[rank].zero_grad()
        schedule.step(batch, target=target)
    if rank != 3:
        stages[3].kept.clear()
    kept = getattr(stages[rank], "kept", [])
    for tensor, contents in kept:  # no receive buffer that the module still holds was written again
        assert torch.equal(tensor, contents)
    assert len(kept) == (18 if rank in (1, 3) else 0)
    kept.clear()
    alone, _, _ = train_alone([_fresh(stage) for stage in stages], nn.MSELoss(), batch, target, 6)
    assert_same_gradients(stages[rank], alone[rank], f"rank {rank}", tolerance=1e-6)


def _fresh(stage: nn.Module) -> nn.Module:
    clone = copy.deepcopy(stage)
    clone.zero_grad()
    return clone


@pytest.mark.parametrize("backend", BACKENDS)
def test_identity_frozen_and_input_keeping_stages_train_as_in_one_process(backend: str) -> None:
    run_ranks(_train_unusual, 4, backend)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, *, factor: torch.Tensor, times: int = 1) -> torch.Tensor:
        return self.linear(x) * factor * times


def _train_with_kwargs(rank: int, world_size: int) -> None:
    # As costly to import as torch itself, so not by every rank of every test.
    from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

    torch.manual_seed(3)
    stages = [Scaled(), Scaled()]
    batch, target, factor = torch.randn(6, 4), torch.randn(6, 4), torch.rand(6, 1)
    stage = PipelineStage(stages[rank], rank, world_size, DEVICE)
    whole = ScheduleGPipe(stage, 3, nn.MSELoss())
    expected = stages[1](stages[0](batch, factor=factor, times=2), factor=factor, times=2).detach()
    output = whole.step(batch, target=target, factor=factor, times=2)
    grads = [p.grad.clone() for p in stages[rank].parameters()]
    if rank == 1:
        assert torch.allclose(output, expected, atol=1e-6)
    stages[rank].zero_grad()
    pre_split = whole.step(
        arg_mbs=[(x,) for x in batch.chunk(3)],
        kwarg_mbs=[{"factor": f, "times": 2} for f in factor.chunk(3)],
        target_mbs=list(target.chunk(3)),
    )
    assert rank == 0 or torch.equal(pre_split, output)
    stages[rank].zero_grad()
    specs = Schedule1F1B(
        stage,
        3,
        nn.MSELoss(),
        args_chunk_spec=(TensorChunkSpec(0),),
        kwargs_chunk_spec={"factor": TensorChunkSpec(0), "times": _Replicate},
        output_merge_spec=TensorChunkSpec(0),
    )
    by_specs = specs.step(batch, target=target, factor=factor, times=2)
    assert rank == 0 or torch.equal(by_specs, output)
    for parameter, grad in zip(stages[rank].parameters(), grads, strict=True):
        assert torch.equal(parameter.grad, grad)


@pytest.mark.parametrize("backend", BACKENDS)
def test_kwargs_chunk_specs_and_pre_split_batches_give_the_same_step(backend: str) -> None:
    run_ranks(_train_with_kwargs, 2, backend)


def _chunk_along_columns(rank: int, world_size: int) -> None:
    from torch.distributed.pipelining.microbatch import TensorChunkSpec

    torch.manual_seed(4)
    stages = [nn.Tanh(), nn.Softsign()]
    batch = torch.randn(3, 8)
    schedule = ScheduleGPipe(
        PipelineStage(stages[rank], rank, world_size, DEVICE),
        4,
        args_chunk_spec=(TensorChunkSpec(1),),
        output_merge_spec=TensorChunkSpec(1),
    )
    args = (batch,) if rank == 0 else ()
    output = schedule.step(*args)
    assert output is None if rank == 0 else torch.equal(output, stages[1](stages[0](batch)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_chunk_specs_choose_the_dimension(backend: str) -> None:
    run_ranks(_chunk_along_columns, 2, backend)


def _evaluate(rank: int, world_size: int) -> None:
    torch.manual_seed(6)
    stages = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(world_size)]
    batch, target = torch.randn(9, 4), torch.randn(9, 4)
    stage = stages[rank]
    schedule = Schedule1F1B(PipelineStage(stage, rank, world_size, DEVICE), 4, nn.MSELoss())
    args = (batch,) if rank == 0 else ()
    kwargs = {"target": target} if rank == world_size - 1 else {}
    for module in stages:
        module.eval()
    with torch.no_grad():
        expected = nn.Sequential(*stages)(batch)
    for _ in range(2):
        losses: list[torch.Tensor] = []
        output = schedule.eval(*args, **kwargs, losses=losses if kwargs else None)
        assert all(p.grad is None for p in stage.parameters())
        if rank == world_size - 1:
            assert torch.allclose(output, expected, atol=1e-6)
            assert len(losses) == 4
            assert not output.requires_grad
            assert torch.allclose(losses[0], nn.functional.mse_loss(expected[:3], target[:3]), atol=1e-6)
            assert schedule.eval() is not None  # without target: outputs alone
        else:
            assert output is None
            assert schedule.eval(*args) is None
        stage.train()
        schedule.step(*args, **kwargs, return_outputs=False)
        assert all(p.grad is not None for p in stage.parameters())
        stage.zero_grad()
        stage.eval()


@pytest.mark.parametrize("backend", BACKENDS)
def test_eval_computes_outputs_and_losses_between_training_steps(backend: str) -> None:
    run_ranks(_evaluate, 3, backend)
