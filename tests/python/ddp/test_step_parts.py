"""A step in parts is one step to the optimizer, and what is updated first leaves first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import seeded
from support.processes import run_ranks

LAYERS = 4


def _model(seed: int = 2, bucket_size: int = 1, dtype: torch.dtype = torch.float32) -> DistributedDataParallel:
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(16, 16, bias=False, dtype=dtype) for _ in range(LAYERS)]
    return DistributedDataParallel(
        torch.nn.Sequential(*layers), bucket_size=bucket_size, use_distributed_optimizer=True, overlap_param_gather=True
    )


class Counting(torch.optim.Optimizer):
    """Elementwise, with counters wherever optimizers have them: of parameters, of param groups, of its own."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.steps = 0
        self.watch: Callable[[], None] | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        if self.watch is not None:
            self.watch()
        self.steps += 1
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for parameter in group["params"]:
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                decay = group["lr"] / (self.steps * group["step"] * state["step"])
                parameter.sub_(parameter.grad, alpha=decay)


def _steps(make: Callable[[Any], torch.optim.Optimizer], in_parts: bool, rank: int) -> list[torch.Tensor]:
    models = [_model(seed) for seed in (2, 3)]  # as the chunks of virtual stages are
    parameters = [parameter for model in models for parameter in model.parameters()]
    groups = [{"params": parameters[::2], "lr": 0.05}, {"params": parameters[1::2]}]
    optimizer = DistributedOptimizer(make(groups), models, overlap_param_gather_with_optimizer_step=in_parts)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    for step in range(5):
        optimizer.zero_grad()
        x = torch.randn(3, 16, generator=seeded(10 * step + rank))
        for model in models:
            x = model(x)
            x.sum().backward()
            x = x.detach()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        scheduler.step()
    for model in models:
        model.start_param_sync(force_sync=True)
    assert getattr(optimizer._inner, "steps", 5) == 5
    assert [group.get("step", 5) for group in optimizer.param_groups] == [5, 5]
    assert len(optimizer.param_groups[0]["params"]) > 1
    return [parameter.detach().clone() for parameter in parameters]


def _is_one_step(rank: int, world_size: int) -> None:
    makes: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda groups: torch.optim.AdamW(groups, lr=0.1),
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    ]
    for make in makes:
        together, in_parts = (_steps(make, mode, rank) for mode in (False, True))
        assert all(map(torch.equal, together, in_parts))
        # Ranks need not agree on it.
        assert all(map(torch.equal, together, _steps(make, rank == 0, rank)))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_in_parts_is_that_of_all_at_once(backend):
    run_ranks(_is_one_step, 2, backend, timeout=60)


def _counts(rank: int, world_size: int) -> None:
    results = []
    for in_parts in (False, True):
        model = _model()
        optimizer = DistributedOptimizer(
            Counting(model.parameters()), model, is_elementwise=True, overlap_param_gather_with_optimizer_step=in_parts
        )
        for step in range(4):
            optimizer.zero_grad()
            model(torch.full((2, 16), 0.1 * (step + rank))).sum().backward()
            optimizer.step()
        model.start_param_sync(force_sync=True)
        assert optimizer._inner.steps == 4
        assert optimizer._inner.param_groups[0]["step"] == 4
        assert optimizer.param_groups[0]["step"] == 4
        results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *results))


def test_counters_of_a_custom_optimizer_count_steps_and_not_parts():
    run_ranks(_counts, 2, BACKENDS[-1], timeout=60)


def _leaves_first(rank: int, world_size: int) -> None:
    """When a part is stepped the gathers of those before it have begun, and no others; forward then waits for each."""
    model = _model(dtype=torch.bfloat16)  # the copies in float32 must be brought to the model part by part, too
    inner = Counting(model.parameters())
    optimizer = DistributedOptimizer(inner, model, is_elementwise=True, overlap_param_gather_with_optimizer_step=True)
    begun: list[float] = []
    with model.record_timeline() as timeline:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 16, dtype=torch.bfloat16)).sum().backward()
            model._param_sync.finish()
            begun.clear()
            inner.watch = lambda: (dist.barrier(), begun.append(_now()))  # type: ignore[assignment]
            optimizer.step()
            inner.watch = None
        model._param_sync.finish()
    gathers = [event for event in timeline.events() if event.kind == "gather"][-LAYERS:]
    assert [event.name for event in gathers] == [f"gather of bucket {i}" for i in reversed(range(LAYERS))]
    assert len(begun) == LAYERS
    for stepped, gather, following in zip(begun, gathers, [*begun[1:], float("inf")], strict=True):
        assert stepped < gather.start < following


def _now() -> float:
    import time

    return time.monotonic()


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_gather_of_each_part_starts_before_the_next_is_stepped(backend):
    run_ranks(_leaves_first, 2, backend, timeout=60)


def _fails(rank: int, world_size: int) -> None:
    """An optimizer that raises in its third part, on one rank: the others have started all gathers, and it does so next."""
    model = _model()
    inner = Counting(model.parameters())
    optimizer = DistributedOptimizer(inner, model, is_elementwise=True, overlap_param_gather_with_optimizer_step=True)
    left = [2]

    def watch() -> None:
        if rank == 1 and left[0] == 0:
            raise ArithmeticError("the third part")
        left[0] -= 1

    optimizer.zero_grad()
    model(torch.ones(2, 16)).sum().backward()
    inner.watch = watch
    if rank == 1:
        with pytest.raises(ArithmeticError, match="the third part"):
            optimizer.step()
    else:
        optimizer.step()
    inner.watch = None
    assert len(inner.param_groups[0]["params"]) == LAYERS
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    model.start_param_sync(force_sync=True)
    for parameter in model.parameters():
        copies = [torch.empty_like(parameter) for _ in range(world_size)]
        dist.all_gather(copies, parameter.detach())
        assert all(map(copies[0].equal, copies))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_part_that_raises_leaves_ranks_in_step(backend):
    run_ranks(_fails, 2, backend, timeout=60)


def _refusals(rank: int, world_size: int) -> None:
    model = _model()
    with pytest.raises(
        ValueError, match="with_optimizer_step=True: expected an optimizer that updates each element by"
    ):
        DistributedOptimizer(
            torch.optim.Adafactor(model.parameters()), model, overlap_param_gather_with_optimizer_step=True
        )
    plain = DistributedDataParallel(torch.nn.Linear(4, 4))
    with pytest.raises(ValueError, match="with_optimizer_step=True: expected a model that is wrapped with use_dist"):
        DistributedOptimizer(
            torch.optim.SGD(plain.parameters(), lr=0.1), plain, overlap_param_gather_with_optimizer_step=rank == 0
        )


def test_what_has_no_parts_is_refused_on_all_ranks():
    run_ranks(_refusals, 2, "gloo", timeout=60)
