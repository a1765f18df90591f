"""Modules that are compiled, or that communicate themselves, train as under torch's DDP."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_nn
from ddp_models import BACKENDS, grads
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from farandole.ddp import DistributedDataParallel
from support.devices import ON_CPU, backend_for, only_on_cpu, seeded
from support.processes import run_ranks


class _Net(torch.nn.Module):
    def __init__(self, group: Any = None) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(4))
        self.norm = torch.nn.BatchNorm1d(6)
        self.group = group

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"out": self.norm(x)}


class _Centered(_Net):
    """Each layer's mean is that over all ranks, as in SyncBatchNorm: collectives in forward and backward."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = layer(x)
            x = torch.tanh(x - dist_nn.all_reduce(x.mean(0), group=self.group) / dist.get_world_size())
        return {"out": x * self.norm.weight + self.norm.bias}


def _is_same(want: torch.Tensor, got: torch.Tensor) -> bool:
    """On a GPU what is compiled may take other kernels, of cuDNN or torch's own."""
    return torch.equal(want, got) if ON_CPU else torch.allclose(want, got, rtol=1e-4, atol=1e-6)


def _compare(models: list[Any], rank: int, steps: int = 3) -> None:
    theirs, ours = models
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for step in range(steps):
        x = torch.randn(4, 6, generator=seeded(10 * step + rank))
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model(x)["out"].square().sum().backward()
        named = {name.replace("_orig_mod.", "").replace("module.", ""): p.grad for name, p in ours.named_parameters()}
        for name, grad in grads(theirs).items():
            assert _is_same(grad, named[name]), f"step {step} rank {rank} {name}"
        for optimizer in optimizers:
            optimizer.step()


def _compiled(rank: int, world_size: int, compiler: str, static: bool) -> None:
    gloo = dist.new_group(backend=backend_for("gloo"))
    for order in ("module first", "wrapper", "in place"):
        torch._dynamo.reset()
        theirs = TorchDdp(_Net(), process_group=gloo)
        module = _Net()
        options = {"bucket_size": 40, "static_graph": static}
        if order == "module first":
            ours = DistributedDataParallel(torch.compile(module, backend=compiler), **options)
        elif order == "wrapper":
            ours = torch.compile(DistributedDataParallel(module, **options), backend=compiler)
        else:
            module.compile(backend=compiler, fullgraph=True)
            ours = DistributedDataParallel(module, **options)
        _compare([theirs, ours], rank)


def _whole_graph(rank: int, world_size: int) -> None:
    model = torch.compile(DistributedDataParallel(_Net()), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match=r"fullgraph=True of farandole\.ddp.*or the module inside to be compiled"):
        model(torch.randn(3, 6))


def test_a_wrapper_in_one_graph_is_refused_by_name():
    run_ranks(_whole_graph, 1, "gloo", timeout=60)


@pytest.mark.sample(2)
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiled_modules_train_as_under_torch_ddp(compiler, static):
    run_ranks(_compiled, 2, "gloo", timeout=240, compiler=compiler, static=static)


def _communicates(rank: int, world_size: int) -> None:
    gloo = dist.new_group(backend=backend_for("gloo"))
    theirs = TorchDdp(_Centered(gloo), process_group=gloo)
    ours = DistributedDataParallel(_Centered(dist.group.WORLD), bucket_size=40)
    _compare([theirs, ours], rank, steps=5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_collectives_of_the_module_go_between_those_of_the_buckets(backend):
    run_ranks(_communicates, 2, backend, timeout=60)


def _synced_norm(rank: int, world_size: int) -> None:
    module = torch.nn.SyncBatchNorm.convert_sync_batchnorm(_Net())
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        TorchDdp(copy.deepcopy(module))
    model = DistributedDataParallel(module)
    with pytest.raises(ValueError, match="SyncBatchNorm expected input tensor to be on GPU"):
        model(torch.ones(4, 6))


@only_on_cpu("SyncBatchNorm is for GPUs")
def test_synced_norms_are_refused_on_the_cpu_by_torch():
    run_ranks(_synced_norm, 1, "gloo")


def _synced_norms(rank: int, world_size: int) -> None:
    group = dist.new_group(backend=backend_for("gloo"))
    convert = torch.nn.SyncBatchNorm.convert_sync_batchnorm
    theirs = TorchDdp(convert(_Net(), group), process_group=group)
    ours = DistributedDataParallel(convert(_Net()), bucket_size=40)
    _compare([theirs, ours], rank, steps=5)


@pytest.mark.skipif(ON_CPU, reason="SyncBatchNorm is for GPUs")
@pytest.mark.parametrize("backend", BACKENDS)
def test_synced_norms_train_as_under_torch_ddp(backend):
    run_ranks(_synced_norms, 2, backend, timeout=60)


def _two_forwards(rank: int, world_size: int) -> None:
    # Torch 2.11's own raises when it broadcasts buffers; gradients do not depend on them.
    models = [TorchDdp(_Net(), broadcast_buffers=False), DistributedDataParallel(_Net())]
    for step in range(3):
        for model in models:
            generator = seeded(10 * step + rank)
            model.zero_grad()
            outputs = [model(torch.randn(4, 6, generator=generator))["out"] for _ in range(2)]
            (outputs[0] * outputs[1]).square().sum().backward()
        for name, grad in grads(models[0]).items():
            assert torch.equal(grad, grads(models[1])[name]), f"step {step} rank {rank} {name}"


def test_two_forwards_may_come_before_one_backward_though_buffers_change():
    run_ranks(_two_forwards, 2, "gloo", timeout=60)


def _with_bytes(rank: int, world_size: int) -> None:
    """float8, which gloo does not know, in what is not trained."""
    module = torch.nn.Linear(3, 2)
    module.quantized = torch.nn.Parameter(torch.full((2, 3), rank + 1.0).to(torch.float8_e4m3fn), requires_grad=False)
    module.register_buffer("scales", torch.full((3,), rank + 1.0).to(torch.float8_e5m2))
    model = DistributedDataParallel(module)
    for _ in range(2):  # buffers before each forward
        assert model.module.quantized.float().unique().tolist() == [1.0]
        assert model.module.scales.float().unique().tolist() == [1.0]
        model(torch.ones(2, 3)).sum().backward()
        model.module.scales.copy_(torch.full((3,), rank + 1.0))
        model(torch.ones(2, 3)).sum().backward()


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_of_one_byte_are_those_of_rank_0(backend):
    run_ranks(_with_bytes, 2, backend, timeout=60)
