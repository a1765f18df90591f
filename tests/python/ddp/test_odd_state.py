"""State of optimizers that is not always there, or not of one element or of all: loaded, or refused by name, never left
out."""

from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import DEVICE, seeded
from support.processes import run_ranks

OPTIONS: list[dict[str, Any]] = [{"grad_reduce_in_fp32": True}, {"use_distributed_optimizer": True}]


class _Odd(torch.optim.Optimizer):
    """Momentum, kept as ``kind`` says."""

    def __init__(self, params: Any, kind: str = "later") -> None:
        super().__init__(params, {"lr": 0.1})
        self.kind = kind

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if self.kind == "later":  # from the second step on
                state["count"] = state.get("count", 0) + 1
                if state["count"] > 1:
                    state.setdefault("average", torch.zeros_like(parameter)).lerp_(parameter.grad, 0.1)
                continue
            if not state:
                averages = [torch.zeros_like(parameter) for _ in range(2)]
                state["averages"] = averages if self.kind == "listed" else torch.stack(averages)
            for average in state["averages"]:
                average.lerp_(parameter.grad, 0.1)


def _pair(make: Any, options: dict[str, Any]) -> tuple[DistributedDataParallel, DistributedOptimizer]:
    torch.manual_seed(3)
    model = DistributedDataParallel(torch.nn.Linear(16, 16).to(DEVICE), **options)
    return model, DistributedOptimizer(make(model.parameters()), model, is_elementwise=True)


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 16, generator=seeded(number)).to(DEVICE)).square().mean().backward()
    optimizer.step()


SETTINGS: dict[str, tuple[Any, dict[str, Any], dict[str, Any], str]] = {
    "momentum": (torch.optim.SGD, {"momentum": 0.9}, {}, "momentum_buffer"),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}, {}, "max_exp_avg_sq"),
    "centered": (torch.optim.RMSprop, {"centered": True}, {}, "grad_avg"),
}


def _load_other_settings(rank: int, world_size: int, name: str, path: str) -> None:
    kind, theirs, ours, key = SETTINGS[name]
    for number, options in enumerate(OPTIONS):
        saved_model, saved = _pair(lambda params: kind(params, lr=0.01, **theirs), options)
        for step in range(3):
            _step(saved_model, saved, step)
        dcp.save({"optimizer": saved}, checkpoint_id=f"{path}/{number}")
        for how in ("state_dict()", "full_state_dict()", "torch.distributed.checkpoint"):
            model, optimizer = _pair(lambda params: kind(params, lr=0.01, **ours), options)
            model.module.load_state_dict(saved_model.module.state_dict())
            settings = str(optimizer.param_groups[0])
            if how == "torch.distributed.checkpoint":  # which reads what is asked for
                with pytest.raises(ValueError, match=rf"has no '{key}' of parameter '\w+': expected"):
                    dcp.load({"optimizer": optimizer}, checkpoint_id=f"{path}/{number}")
                assert str(optimizer.param_groups[0]) == settings
                continue
            optimizer.load_state_dict(saved.state_dict() if how == "state_dict()" else saved.full_state_dict())
            other_model, other = _pair(lambda params: kind(params, lr=0.01, **theirs), options)
            other_model.module.load_state_dict(saved_model.module.state_dict())
            other.load_state_dict(saved.full_state_dict())
            for step in range(3, 5):
                _step(model, optimizer, step)
                _step(other_model, other, step)
            for value, expected in zip(model.parameters(), other_model.parameters(), strict=True):
                assert torch.equal(value, expected), how


@pytest.mark.parametrize("name", SETTINGS)
def test_state_that_comes_with_the_settings_is_loaded_or_missed(name, tmp_path):
    run_ranks(_load_other_settings, 2, "farandole", name=name, path=str(tmp_path))


def _load_later(rank: int, world_size: int) -> None:
    for options in OPTIONS:
        saved_model, saved = _pair(_Odd, options)
        for step in range(2):
            _step(saved_model, saved, step)
        model, optimizer = _pair(_Odd, options)
        for state in (saved.state_dict(), saved.full_state_dict()):
            with pytest.raises(
                ValueError, match=r"has 'average' of parameter '\w+', which this optimizer does not make"
            ):
                optimizer.load_state_dict(state)
        for step in range(2):
            _step(model, optimizer, step)
        optimizer.load_state_dict(saved.full_state_dict())


def test_state_that_the_optimizer_does_not_make_is_refused():
    run_ranks(_load_later, 2, "farandole")


def _save_uncut(rank: int, world_size: int, kind: str) -> None:
    for options in OPTIONS:
        model, optimizer = _pair(lambda params: _Odd(params, kind), options)
        _step(model, optimizer, 0)
        if "use_distributed_optimizer" not in options:
            optimizer.load_state_dict(optimizer.full_state_dict())
            continue
        for save in (optimizer.state_dict, optimizer.full_state_dict):
            with pytest.raises(
                ValueError, match=r"the optimizer's 'averages' of parameter '\w+' is a (list|Tensor) with"
            ):
                save()


@pytest.mark.parametrize("kind", ["listed", "stacked"])
def test_state_that_cannot_be_cut_is_refused(kind):
    run_ranks(_save_uncut, 2, "farandole", kind=kind)


class _Scaled(torch.nn.Module):
    """With a parameter that has no dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer, self.gain = torch.nn.Linear(16, 16), torch.nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * self.layer(x)


def _number(rank: int, world_size: int, name: str, path: str) -> None:
    """Of one layout, or of no wrapper at all, it is loaded by those of another."""

    def make(module: torch.nn.Module) -> torch.optim.Optimizer:
        parameters = module.parameters()
        return torch.optim.NAdam(parameters, lr=0.01) if name == "NAdam" else torch.optim.ASGD(parameters, 0.01, t0=1)

    layouts: list[dict[str, Any]] = [{}, {"use_distributed_optimizer": True}]
    for before, after in (layouts, layouts[::-1]):
        for way in ("full_state_dict()", "torch.distributed.checkpoint", "taken over"):
            plain, module = _Scaled(), _Scaled()
            expected = make(plain)
            model: torch.nn.Module = module if way == "taken over" else DistributedDataParallel(module, **before)
            used = make(model) if way == "taken over" else DistributedOptimizer(make(model), model)
            for step in range(6):
                if step == 3:
                    model = DistributedDataParallel(module, **after)
                    optimizer = DistributedOptimizer(used if way == "taken over" else make(model), model)
                    if way == "full_state_dict()":
                        optimizer.load_state_dict(used.full_state_dict())
                    elif way == "torch.distributed.checkpoint":
                        dcp.save({"optimizer": used}, checkpoint_id=f"{path}/{bool(before)}")
                        dcp.load({"optimizer": optimizer}, checkpoint_id=f"{path}/{bool(before)}")
                    used = optimizer
                _step(model, used, step)
                _step(plain, expected, step)
            for value, want in zip(model.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(value, want, rtol=1e-5, atol=1e-6, msg=f"{way} {before} {after}")


@pytest.mark.parametrize("name", ["NAdam", "ASGD"])
def test_numbers_that_are_no_part_of_a_parameter_without_dimensions_are_loaded_by_any_layout(name, tmp_path):
    run_ranks(_number, 2, "farandole", name=name, path=str(tmp_path))
