"""Stages that torch made, by hand or by tracing a model, run by our schedules as by torch's own."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.pipelining import (
    ScheduleFromPlan,
    ScheduleGPipe,
    build_stage,
    get_schedule_class,
    plan,
)
from pipelining.pipeline_support import BACKENDS, assert_same_gradients, random_stages, train_alone
from support.devices import DEVICE
from support.processes import run_ranks

WIDTH = 6


class Skipping(nn.Module):
    """Cut before b, c and d: the first stage's outputs go to several others, c takes its arguments out of order."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.d = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None, *, mask: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.a(x)) * scale
        u = torch.tanh(self.b(h))
        v = torch.tanh(self.c(u)) * mask + h
        w = self.d(v + u)
        return w * v.sum(1, keepdim=True)


class Forked(nn.Module):
    """The same with each output for one stage alone, which is what torch's backward can do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.d = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
        h = self.a(x) * scale
        skipped, h = torch.sin(h), torch.tanh(h)
        h = torch.tanh(self.b(h))
        h = torch.tanh(self.c(h))
        return self.d(h * skipped)


def _trace(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    from farandole.pipelining import SplitPoint, pipeline

    cuts = {name: SplitPoint.BEGINNING for name in "bcd"}
    return pipeline(copy.deepcopy(model), mb_args=args, mb_kwargs=kwargs, split_spec=cuts)


def _assert_gradients(stage: nn.Module, alone: nn.Module, where: str) -> None:
    expected = dict(alone.named_parameters())
    for name, parameter in stage.named_parameters():
        assert parameter.grad is not None, f"{where}: {name} has no gradient"
        assert torch.allclose(parameter.grad, expected[name].grad, rtol=2e-5, atol=1e-6), f"{where}: {name}"


def _train_traced(rank: int, world_size: int) -> None:
    model = Skipping()
    batch, scale, mask, target = torch.randn(8, WIDTH), torch.rand(8, 1), torch.rand(8, 1), torch.randn(8, 3)
    n = 4
    for parts in zip(*(tensor.chunk(n) for tensor in (batch, scale, mask, target)), strict=True):
        nn.functional.mse_loss(model(parts[0], parts[1], mask=parts[2]), parts[3]).backward(torch.tensor(1 / n))
    for name in ("1F1B", "ZB-H1") if world_size == 4 else ("InterleavedZeroBubble", "ZBV"):
        for build in ("theirs", "ours"):
            pipe = _trace(model, batch[:2], scale[:2], mask=mask[:2])
            owners = plan(name, 4, n, num_ranks=world_size).rank_of_stage
            mine = [i for i, owner in enumerate(owners) if owner == rank]
            if build == "theirs":
                stages = [pipe.build_stage(i, torch.device(DEVICE)) for i in mine]
            else:
                stages = [build_stage(pipe.get_stage_module(i), i, pipe.info(), DEVICE) for i in mine]
            schedule = get_schedule_class(name)(stages[0] if world_size == 4 else stages, n, nn.MSELoss())
            assert (0, 2) in (schedule.plan().edges or []), schedule.plan().edges
            for _ in range(2):
                for stage in stages:
                    stage.submod.zero_grad()
                args = (batch, scale) if 0 in mine else ()
                kwargs = {"mask": mask} if 2 in mine else {}
                output = schedule.step(*args, target=target, **kwargs)
                for stage in stages:
                    _assert_gradients(stage.submod, model, f"{name}, {build}, stage {stage.stage_index}")
                if 3 in mine:
                    assert torch.allclose(output, model(batch, scale, mask=mask), atol=1e-6)
    if world_size == 2:
        with pytest.raises(ValueError, match="edges was given, expected None: the stages are of a traced model"):
            get_schedule_class("ZBV")(stages, n, nn.MSELoss(), edges=[(0, 1)])
        made = plan("ZBV", 4, n, num_ranks=2)
        with pytest.raises(ValueError, match=r"the plan has the edges .*, expected .*: those of the traced model"):
            ScheduleFromPlan(stages, made, nn.MSELoss())
        made = plan("ZBV", 4, n, num_ranks=2, edges=schedule.plan().edges)
        for stage in stages:
            stage.submod.zero_grad()
        ScheduleFromPlan(stages, made, nn.MSELoss()).step(*args, target=target, **kwargs)
        for stage in stages:
            _assert_gradients(stage.submod, model, f"a plan, stage {stage.stage_index}")


@pytest.mark.sample(2)
@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_traced_model_with_skips_and_later_inputs_trains_as_in_one_process(backend: str, world_size: int) -> None:
    run_ranks(_train_traced, world_size, backend, timeout=120)


def _train_beside_torch(rank: int, world_size: int) -> None:
    from torch.distributed import pipelining as theirs

    model = Forked()
    batch, scale, target = torch.randn(8, WIDTH), torch.rand(8, 1), torch.randn(8, 3)
    pipe = _trace(model, batch[:2], scale=scale[:2])
    stage = pipe.build_stage(rank, torch.device(DEVICE))
    args = (batch,) if rank == 0 else ()
    kwargs = {"scale": scale} if rank == 0 else {"target": target} if rank == world_size - 1 else {}
    expected = theirs.ScheduleGPipe(stage, 4, nn.MSELoss()).step(*args, **kwargs)
    grads = [parameter.grad for parameter in stage.submod.parameters()]
    assert all(grad is not None for grad in grads)
    for name in ("GPipe", "1F1B", "ZB-H1"):
        stage.submod.zero_grad()
        output = get_schedule_class(name)(stage, 4, nn.MSELoss()).step(*args, **kwargs)
        assert output is None if expected is None else torch.equal(output, expected)
        for parameter, grad in zip(stage.submod.parameters(), grads, strict=True):
            assert torch.allclose(parameter.grad, grad, rtol=2e-5, atol=1e-7), name


def test_a_traced_model_trains_as_under_torchs_own_schedule() -> None:
    run_ranks(_train_beside_torch, 4, "gloo", timeout=120)


def _train_manual(rank: int, world_size: int) -> None:
    from torch.distributed import pipelining as theirs

    modules = random_stages(random.Random(3), world_size)
    batch = torch.randn(6, modules[0][0].in_features)
    target = torch.randn_like(nn.Sequential(*modules)(batch).detach())
    alone, _, _ = train_alone(modules, nn.MSELoss(), batch, target, 3)
    built: list[int] = []

    def dw_builder() -> Any:
        built.append(len(built))
        return lambda: None

    group = dist.new_group(list(range(world_size)))
    device = torch.device(DEVICE)
    stage = theirs.PipelineStage(modules[rank], rank, world_size, device, group=group, dw_builder=dw_builder)
    schedule = ScheduleGPipe(stage, 3, nn.MSELoss())
    assert schedule._stages[0].group is group
    schedule.step(batch, target=target)
    assert_same_gradients(modules[rank], alone[rank], "manual")
    assert built == [0, 1, 2]
    with pytest.raises(TypeError, match=r"stages\[0\] is a Tanh"):
        get_schedule_class("ZBV")([nn.Tanh()], 3, nn.MSELoss())
    with pytest.raises(TypeError, match="stage_module is a Linear, expected a module of torch's pipeline"):
        build_stage(
            nn.Linear(WIDTH, WIDTH), 1, _trace(Forked(), torch.randn(2, WIDTH), scale=torch.rand(2, 1)).info(), "cpu"
        )


def test_torchs_manual_stages_run() -> None:
    run_ranks(_train_manual, 2, "gloo")


def _wrap_traced(rank: int, world_size: int) -> None:
    """Two stages, two replicas of each: rank 2 r + s has stage s of replica r."""
    from farandole.pipelining import SplitPoint, pipeline

    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    batch, target = torch.randn(8, WIDTH), torch.randn(8, 3)
    replica, index = divmod(rank, 2)
    pipelines = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    pipe = pipeline(copy.deepcopy(model), mb_args=(batch[:2],), split_spec={"2": SplitPoint.BEGINNING})
    inner = pipe.get_stage_module(index)
    wrapped = nn.parallel.DistributedDataParallel(inner, process_group=replicas[index])
    stage = build_stage(wrapped, index, pipe.info(), DEVICE, pipelines[replica])
    half = slice(4 * replica, 4 * replica + 4)
    ScheduleGPipe(stage, 2, nn.MSELoss()).step(batch[half], target=target[half])
    nn.functional.mse_loss(model(batch), target).backward()
    _assert_gradients(inner, model, f"rank {rank}")


def test_a_traced_stage_may_be_wrapped_for_data_parallelism() -> None:
    run_ranks(_wrap_traced, 4, "gloo")
