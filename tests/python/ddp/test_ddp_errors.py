"""Bad input is one clear error on every rank that can know; nobody hangs, and the group works afterwards."""

from __future__ import annotations

import re

import pytest
import torch
from ddp_models import BACKENDS

from farandole.ddp import DistributedDataParallel
from support.devices import DEVICE, ON_CPU, seeded
from support.processes import run_ranks

TIMEOUT = 30 if ON_CPU else 90


class _Layers(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2) for name in ("front", "middle", "back")})

    def forward(self, x, skip: str = ""):
        for name, layer in self.layers.items():
            if name != skip:
                x = layer(x)
        return x.square().sum()


def _input(rank: int) -> torch.Tensor:
    return torch.randn(2, 2, generator=seeded(rank))


def _error_of(body, kind=RuntimeError) -> str:
    try:
        body()
    except kind as error:
        return str(error)
    return ""


def _unused(rank: int, world_size: int, bucket_size: int | None) -> tuple[str, list[list[float]]]:
    model = DistributedDataParallel(_Layers(), bucket_size=bucket_size)
    skip = "middle" if rank == 1 else ""
    error = _error_of(lambda: model(_input(rank), skip).backward())
    seen = [parameter.grad.flatten().tolist() for parameter in model.parameters()]
    model.zero_grad()
    model(_input(rank)).backward()  # the step after works
    plain = _Layers()
    sum(plain(_input(other)) for other in range(world_size)).div(world_size).backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(ours.grad, theirs.grad, rtol=1e-5, atol=1e-8 if ON_CPU else 1e-6)
    return error, seen


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bucket_size", [1, None])
def test_an_unused_parameter_is_named_and_all_ranks_agree_on_the_gradients(backend, bucket_size):
    results = run_ranks(_unused, 3, backend, timeout=TIMEOUT, bucket_size=bucket_size)
    for error, _ in results:
        assert "rank 1 of the group: 2 of 6 parameters got no gradient" in error
        assert set(re.findall(r"'(layers[^']*)'", error)) == {"layers.middle.weight", "layers.middle.bias"}
    assert results[0][1] == results[1][1] == results[2][1]


def _two_in_trouble(rank: int, world_size: int) -> str:
    model = DistributedDataParallel(_Layers(), bucket_size=1)
    skip = {0: "front", 2: "back"}.get(rank, "")
    return _error_of(lambda: model(_input(rank), skip).backward())


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_wrong_on_several_ranks_is_told_of_each(backend):
    for error in run_ranks(_two_in_trouble, 3, backend, timeout=TIMEOUT):
        told = dict(re.findall(r"rank (\d) of the group: 2 of 6 parameters got no gradient [^:]*: '([^']*)'", error))
        assert told == {"0": "layers.front.weight", "2": "layers.back.weight"}


def _on_two_devices(rank: int, world_size: int) -> str:
    module = _Layers()
    if rank == 1:
        module.layers["middle"].to("meta")
    error = _error_of(lambda: DistributedDataParallel(module), ValueError)
    DistributedDataParallel(_Layers())(_input(rank)).backward()  # the group still works
    return error


@pytest.mark.parametrize("backend", BACKENDS)
def test_parameters_on_several_devices_are_refused_on_all_ranks(backend):
    for error in run_ranks(_on_two_devices, 2, backend, timeout=TIMEOUT):
        assert "rank 1" in error
        assert f"parameter 'layers.middle.weight' is on meta, 'layers.front.weight' on {DEVICE}" in error


def _different(rank: int, world_size: int, kind: str) -> str:
    model = _Layers()
    if rank == 1:
        if kind == "shape":
            model.layers["middle"] = torch.nn.Linear(2, 3)
        elif kind == "dtype":
            model.layers["middle"].double()
        elif kind == "name":
            model.layers["last"] = model.layers.pop("back")
        elif kind == "count":
            del model.layers["back"]
        elif kind == "frozen":
            model.layers["middle"].bias.requires_grad_(False)
        elif kind == "buffer":
            model.register_buffer("steps", torch.zeros(1))
    error = _error_of(lambda: DistributedDataParallel(model), ValueError)
    DistributedDataParallel(_Layers())(_input(rank)).backward()  # the group still works
    return error


@pytest.mark.parametrize(
    ("kind", "difference"),
    [
        ("shape", f"rank 0 has parameter 'layers.middle.weight': [2, 2] Float on {DEVICE}, trainable; rank 1 has"),
        ("dtype", f"rank 1 has parameter 'layers.middle.weight': [2, 2] Double on {DEVICE}, trainable"),
        ("name", "rank 0 has parameter 'layers.back.weight'"),
        (
            "count",
            f"rank 0 has parameter 'layers.back.weight': [2, 2] Float on {DEVICE}, trainable; rank 1 has nothing more",
        ),
        ("frozen", f"rank 1 has parameter 'layers.middle.bias': [2] Float on {DEVICE}, frozen"),
        ("buffer", f"rank 0 has nothing more; rank 1 has buffer 'steps': [1] Float on {DEVICE}"),
    ],
)
def test_the_first_difference_between_models_is_named_on_every_rank(kind, difference):
    errors = run_ranks(_different, 2, "gloo", timeout=TIMEOUT, kind=kind)
    assert errors[0] == errors[1]
    assert difference in errors[0]


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, armed):
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.armed:
            raise MemoryError("too much")
        return grad, None


class _Bomb(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.back = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)

    def forward(self, x, armed: bool):
        return self.back(_Raises.apply(self.front(x), armed)).sum()


def _raised(rank: int, world_size: int) -> str:
    model = DistributedDataParallel(_Bomb(), bucket_size=1)
    if rank == 1:
        with pytest.raises(MemoryError, match="too much"):
            model(_input(rank), True).backward()
        error = _error_of(lambda: model(_input(rank), False))
    else:
        error = _error_of(lambda: model(_input(rank), False).backward())
    model.zero_grad()
    model(_input(rank), False).backward()
    return error


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backward_that_raises_is_ended_by_the_next_forward(backend):
    for error in run_ranks(_raised, 2, backend, timeout=TIMEOUT):
        assert "rank 1 of the group: a forward began before the last backward that synchronizes had ended" in error
        assert "'front.weight', 'front.bias'" in error


def _refusals(rank: int, world_size: int) -> None:
    embedding = DistributedDataParallel(torch.nn.Embedding(4, 2, sparse=True))
    with pytest.raises(RuntimeError, match="gradient of parameter 'weight' is sparse"):
        embedding(torch.tensor([1])).sum().backward()
    model = DistributedDataParallel(_Layers())
    with pytest.raises(RuntimeError, match=r"create_graph=True.*is not supported"):
        model(_input(rank)).backward(create_graph=True)
    compiled = torch._dynamo.compiled_autograd._enable(lambda graph: graph)
    with pytest.raises(NotImplementedError, match=r"compiled autograd does not run the hooks .*: expected"), compiled:
        model(_input(rank)).backward()
    with pytest.raises(ValueError, match="bucket_size=-3: expected at least 1"):
        DistributedDataParallel(_Layers(), bucket_size=-3)
    with pytest.raises(ValueError, match="unused_parameters='drop': expected 'error', 'zero_fill' or 'skip'"):
        DistributedDataParallel(_Layers(), unused_parameters="drop")
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        DistributedDataParallel(torch.nn.ReLU())
    with pytest.raises(TypeError, match=r"module is a int: expected a torch\.nn\.Module"):
        DistributedDataParallel(3)


def test_what_is_not_supported_is_refused_by_name():
    run_ranks(_refusals, 1, "gloo")


def _frozen_later(rank: int, world_size: int) -> str:
    model = DistributedDataParallel(_Layers())
    model.module.layers["front"].requires_grad_(False)
    return _error_of(lambda: model(_input(rank)).backward())


def test_a_parameter_that_is_frozen_later_is_named():
    for error in run_ranks(_frozen_later, 2, "gloo", timeout=TIMEOUT):
        assert "'layers.front.weight', 'layers.front.bias'" in error


def test_without_a_group_the_error_says_what_to_call():
    with pytest.raises(ValueError, match="init_process_group"):
        DistributedDataParallel(_Layers())


def _large(rank: int, world_size: int) -> list[str]:
    """What is found in gradients of two parameters of one bucket, the first registered of which comes last."""
    found = []
    for options in ({}, {"check_for_nan_in_grad": True}):
        for grads in ((1.0, 1.0), (1.0, torch.inf), (torch.nan, 100.0), (100.0, torch.nan), (torch.nan, 1.0)):
            model = DistributedDataParallel(torch.nn.Linear(1, 1), check_for_large_grads=10.0, **options)
            weight, bias = model.module.weight, model.module.bias
            of_rank = grads if rank == 1 else (1.0, 1.0)
            loss = model(torch.zeros(1, 1)).sum() * 0 + weight.sum() * of_rank[0] + bias.sum() * of_rank[1]
            found.append(_error_of(loss.backward).partition("gradient of parameter ")[2].partition("\n")[0])
    return found


def test_gradients_that_are_too_large_are_found_beside_what_is_not_finite():
    for found in run_ranks(_large, 2, "gloo", timeout=60):
        *large, alone = found[:5]
        limit = "more than check_for_large_grads=10"
        assert large == [
            "",
            f"'bias' (bucket 0) has a norm of inf, {limit}",
            f"'bias' (bucket 0) has a norm of 100, {limit}",
            f"'weight' (bucket 0) has a norm of 100, {limit}",
        ]
        assert alone == ""  # nobody asked for it
        nan, infinite = "is NaN somewhere", "'bias' (bucket 0) is infinite somewhere"
        assert found[5:7] == ["", infinite]
        assert [nan in error or "norm of 100" in error for error in found[7:]] == [True] * 3


class _Parts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)

    def forward(self, x, both=True):
        return (self.always(x) + self.sometimes(x) if both else self.always(x)).sum()


def _two_models(rank, world_size):
    x = torch.ones(2, 4)
    models = [DistributedDataParallel(_Parts()) for _ in range(2)]
    for broken in range(2):
        with pytest.raises(RuntimeError, match="got no gradient"):
            sum(model(x, index != broken) for index, model in enumerate(models)).backward()
        sum(model(x) for model in models).backward()  # the next step runs, of both


def test_an_error_of_one_model_leaves_the_round_of_another_ended():
    run_ranks(_two_models, 2, "farandole")
