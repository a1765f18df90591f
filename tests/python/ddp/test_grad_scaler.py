"""torch's plain GradScaler: a step that overflows anywhere is skipped everywhere, and scales stay the same."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import DEVICE, seeded
from support.processes import run_ranks

# (parameters, gradients): float16 with gradients of its own type is what the scaler must not see.
TYPES = [(torch.float32, None), (torch.float16, None), (torch.float16, torch.float32)]
STEPS = 8


class Rows(torch.nn.Module):
    """Each element's gradient comes from one element of the input alone, so that one of them can overflow."""

    def __init__(self, stage: int, dtype: torch.dtype) -> None:
        super().__init__()
        generator = seeded(stage)
        self.rows = torch.nn.ParameterList(
            torch.nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in (70, 3, 200)
        )

    def forward(self, xs: list[torch.Tensor]) -> torch.Tensor:
        outputs = [row * x.to(row.dtype) for row, x in zip(self.rows, xs, strict=True)]
        return torch.cat(outputs).float().square().sum()

    def batch(self, step: int, stage: int, replica: int) -> list[torch.Tensor]:
        generator = seeded(100 * step + 10 * stage + replica)
        xs = [torch.rand(row.numel(), generator=generator) * 0.1 + 0.01 for row in self.rows]
        # Of two replicas, one has the first row, the other the end of the last one; a stage after the first has no overflow.
        if stage == 0 and replica == 1 and step in (2, 5):
            xs[0 if step == 2 else 2][-1] = torch.inf
        return xs


class Alone:
    """One process: the sum of all stages, averaged over replicas, with the plain scaler and optimizer."""

    def __init__(self, stages: int, dtype: torch.dtype, make: Any) -> None:
        self.modules = [Rows(stage, dtype) for stage in range(stages)]
        self.parameters = [parameter for module in self.modules for parameter in module.parameters()]
        self.copies = [torch.nn.Parameter(parameter.detach().float()) for parameter in self.parameters]
        self.optimizer = make(self.copies)
        self.scaler = _scaler()

    def step(self, step: int, max_norm: float | None) -> None:
        for copy in self.copies:
            copy.grad = torch.zeros_like(copy)
        for replica in range(2):
            loss = sum(module(module.batch(step, stage, replica)) for stage, module in enumerate(self.modules))
            grads = torch.autograd.grad(self.scaler.scale(loss), self.parameters)
            for copy, grad in zip(self.copies, grads, strict=True):
                copy.grad.add_(grad.float(), alpha=0.5)
        self.scaler.unscale_(self.optimizer)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.copies, max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        with torch.no_grad():
            torch._foreach_copy_(self.parameters, self.copies)


def _scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler(DEVICE, init_scale=512.0, growth_interval=2)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def _adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


def _trains(
    stage: int, replica: int, stages: int, types: Any, clips: bool, groups: dict[str, Any], make: Any, **options: Any
) -> list[float]:
    dtype, grad_dtype = types
    model = DistributedDataParallel(
        Rows(stage, dtype),
        process_group=groups["replicas"],
        grad_reduce_in_fp32=grad_dtype is torch.float32,
        bucket_size=1000,
        **options,
    )
    optimizer = DistributedOptimizer(make(model.parameters()), model, model_parallel_group=groups["stages"])
    alone, scaler, scales = Alone(stages, dtype, make), _scaler(), []
    where = f"{types} clips {clips} {make.__name__} {options} rank {dist.get_rank()}"
    for step in range(STEPS):
        alone.step(step, 0.05 if clips else None)
        optimizer.zero_grad()
        scaler.scale(model(model.module.batch(step, stage, replica))).backward()
        if clips:
            scaler.unscale_(optimizer)
            optimizer.clip_grad_norm_(0.05)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert scales[-1] == alone.scaler.get_scale(), f"{where} step {step}"
    if options.get("use_distributed_optimizer"):
        model.start_param_sync(force_sync=True)
    for got, want in zip(model.module.parameters(), alone.modules[stage].parameters(), strict=True):
        torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3, msg=lambda text: f"{where}: {text}")
    return scales


def _grid(rank: int, stages: int) -> tuple[int, int, dict[str, Any]]:
    """This rank's stage and replica, and the groups."""
    rows = [dist.new_group([2 * stage, 2 * stage + 1]) for stage in range(stages)]
    columns = [dist.new_group(list(range(replica, 2 * stages, 2))) for replica in range(2)]
    stage, replica = divmod(rank, 2)
    return stage, replica, {"replicas": rows[stage], "stages": columns[replica] if stages > 1 else None}


def _replicas(rank: int, world_size: int, stages: int) -> None:
    stage, replica, groups = _grid(rank, stages)
    for types, clips, sharded in itertools.product(TYPES, (False, True), (False, True)):
        scales = _trains(stage, replica, stages, types, clips, groups, _adam, use_distributed_optimizer=sharded)
        assert scales == [512.0, 1024.0, 512.0, 512.0, 1024.0, 512.0, 512.0, 1024.0]
    _trains(stage, replica, stages, TYPES[0], True, groups, _adafactor, use_distributed_optimizer=True)
    _trains(stage, replica, stages, TYPES[2], True, groups, _adafactor, use_distributed_optimizer=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("stages", [1, 2])
def test_a_step_that_overflows_on_one_rank_or_stage_is_skipped_on_all(backend, stages):
    run_ranks(_replicas, 2 * stages, backend, timeout=60, stages=stages)


class _One(torch.nn.Module):
    """One rank has nothing but padding."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, x: float) -> torch.Tensor:
        return (x * self.weight.float()).sum()


def _padding(rank: int, world_size: int) -> None:
    for make in (_adam, _adafactor):
        model = DistributedDataParallel(_One(torch.float32), use_distributed_optimizer=True)
        optimizer, scaler = DistributedOptimizer(make(model.parameters()), model), _scaler()
        for x, scale in ((1.0, 512.0), (torch.inf, 256.0), (1.0, 256.0), (1.0, 512.0)):
            before = model.module.weight.tolist()
            model.zero_grad_buffer()  # as Megatron's loops begin a step
            scaler.scale(model(x)).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale
            assert (model.module.weight.tolist() == before) == (x == torch.inf)


def test_a_rank_that_has_padding_alone_learns_of_overflows():
    run_ranks(_padding, 2, BACKENDS[-1], timeout=60)


def _after_a_skipped_step(rank: int, world_size: int) -> None:
    """float32 copies of gradients are those of the last backward, also where nothing but model.zero_grad_buffer() came
    after a step that was skipped."""
    model = DistributedDataParallel(_One(torch.bfloat16), use_distributed_optimizer=True)
    optimizer, scaler = DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model), _scaler()
    for x in (torch.inf, 0.25):
        model.zero_grad_buffer()
        scaler.scale(model(x)).backward()
        scaler.step(optimizer)
        scaler.update()
    assert model.module.weight.tolist() == [0.75] * 3


def test_gradients_of_a_skipped_step_do_not_come_back():
    run_ranks(_after_a_skipped_step, 2, BACKENDS[-1], timeout=60)


def _refused(rank: int, world_size: int) -> None:
    """Stages of different types: the one that can go on learns that the other cannot."""
    stage, _, groups = _grid(rank, 2)
    model = DistributedDataParallel(
        _One(torch.float16 if stage == 1 else torch.float32),
        process_group=groups["replicas"],
        use_distributed_optimizer=True,
    )
    optimizer = DistributedOptimizer(_adafactor(model.parameters()), model, model_parallel_group=groups["stages"])
    scaler = _scaler()
    optimizer.zero_grad()
    scaler.scale(model(1.0)).backward()
    start = time.monotonic()
    if stage == 1:
        with pytest.raises(ValueError, match=r"float16, and Adafactor needs them whole.*grad_reduce_in_fp32=True"):
            scaler.step(optimizer)
    else:
        with pytest.raises(RuntimeError, match=r"GradScaler.unscale_\(\) was refused on another rank"):
            scaler.step(optimizer)
    assert time.monotonic() - start < 10


def test_float16_gradients_of_whole_parameters_are_refused_on_all_ranks():
    run_ranks(_refused, 4, BACKENDS[-1], timeout=60)
