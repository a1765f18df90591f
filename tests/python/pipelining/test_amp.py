"""Mixed precision around a pipeline's step: autocast, and a gradient scaler that all ranks agree on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.pipelining import PipelineStage, get_schedule_class, plan
from pipelining.pipeline_support import BACKENDS
from support.devices import DEVICE, seeded
from support.processes import run_ranks

WIDTH, STEPS, N = 8, 5, 4


class Block(nn.Module):
    """Can make its own gradients, and those of the stages before it, as large as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)  # in float32 under autocast
        self.larger = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(torch.tanh(self.first(self.norm(x))))
        return y + (y - y.detach()) * self.larger


def _data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = seeded(step)
    return torch.randn(2 * N, WIDTH, generator=generator), torch.randn(2 * N, WIDTH, generator=generator)


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler(DEVICE, init_scale=2.0**10, growth_interval=2)


def _enlarge(modules: list[nn.Module], step: int) -> None:
    # Only the first stages overflow in the third step.
    modules[0].larger = 3e38 if step == 2 else 0.0


def _loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), target)


def _train_alone(modules: list[nn.Module]) -> list[tuple[float, list[list[torch.Tensor]]]]:
    """After each step the scale, and the parameters by stage."""
    alone = copy.deepcopy(modules)
    optimizer = torch.optim.SGD([p for module in alone for p in module.parameters()], lr=0.1)
    scaler, seen = _scaler(), []
    for step in range(STEPS):
        _enlarge(alone, step)
        optimizer.zero_grad()
        batch, target = _data(step)
        with torch.autocast(DEVICE, torch.bfloat16):
            for x, y in zip(batch.chunk(N), target.chunk(N), strict=True):
                for module in alone:
                    x = module(x)
                assert x.dtype == torch.bfloat16
                scaler.scale(_loss(x, y)).backward(torch.tensor(1 / N))
        scaler.step(optimizer)
        scaler.update()
        seen.append((scaler.get_scale(), [[p.detach().clone() for p in module.parameters()] for module in alone]))
    return seen


def _train(rank: int, world_size: int) -> None:
    for name in ("1F1B", "ZB-H1", "ZBV", "InterleavedZeroBubble"):
        num_stages = world_size * (1 if name in ("1F1B", "ZB-H1") else 2)
        torch.manual_seed(4)
        modules: list[nn.Module] = [Block() for _ in range(num_stages)]
        expected = _train_alone(modules)
        owners = plan(name, num_stages, N, num_ranks=world_size).rank_of_stage
        stages = [PipelineStage(modules[i], i, num_stages, DEVICE) for i, owner in enumerate(owners) if owner == rank]
        scaler = _scaler()

        def loss_fn(output: Any, target: torch.Tensor, scaler: Any = scaler) -> torch.Tensor:
            return scaler.scale(_loss(output, target))

        schedule = get_schedule_class(name)(stages if num_stages > world_size else stages[0], N, loss_fn)
        optimizer = torch.optim.SGD([p for stage in stages for p in stage.submod.parameters()], lr=0.1)
        scaler.scale(torch.zeros(()))  # makes the scale also where there is no loss
        for step, (scale, parameters) in enumerate(expected):
            _enlarge(modules, step)
            optimizer.zero_grad()
            batch, target = _data(step)
            with torch.autocast(DEVICE, torch.bfloat16):
                schedule.step(batch, target=target)
            scaler.unscale_(optimizer)
            for found_inf in scaler._found_inf_per_device(optimizer).values():
                assert step != 2 or found_inf.item() == (0 in [stage.stage_index for stage in stages])
                dist.all_reduce(found_inf, dist.ReduceOp.MAX)
            scaler.step(optimizer)
            scaler.update()
            where = f"{name}, step {step}, rank {rank}"
            assert scaler.get_scale() == scale, where
            for stage in stages:
                pairs = zip(stage.submod.parameters(), parameters[stage.stage_index], strict=True)
                for parameter, other in pairs:
                    assert torch.allclose(parameter, other, rtol=1e-5, atol=1e-6), where
        assert expected[1][0] == 2.0**11 and expected[2][0] == 2.0**10  # it grew, and fell when gradients overflowed


@pytest.mark.parametrize("backend", BACKENDS)
def test_autocast_and_a_gradient_scaler_train_as_in_one_process(backend: str) -> None:
    run_ranks(_train, 2, backend)
