"""torch's arguments of DistributedDataParallel mean what they mean in torch."""

from __future__ import annotations

import contextlib
import copy
import random

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS, fewer
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as TorchDdp

from farandole.ddp import DistributedDataParallel
from support.devices import DEVICE, ON_CPU, backend_for, seeded
from support.processes import run_ranks


class _Normed(torch.nn.Module):
    """Two norms whose running averages depend on the batches that a rank has seen, and a counter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 6),
            torch.nn.BatchNorm1d(6),
            torch.nn.ReLU(),
            torch.nn.Linear(6, 3),
            torch.nn.BatchNorm1d(3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def _buffers(rank: int, world_size: int, seeds: list[int]) -> None:
    """A random program of forwards; buffers, gradients and outputs as under torch's DDP after each."""
    gloo = dist.new_group(backend=backend_for("gloo"))
    for seed in seeds:
        rng = random.Random(seed)
        broadcast = rng.random() < 0.8
        models = [
            TorchDdp(_Normed(), process_group=gloo, broadcast_buffers=broadcast),
            DistributedDataParallel(_Normed(), broadcast_buffers=broadcast),
        ]
        for step in range(12):
            kind = rng.choice(["train", "train", "no_sync", "eval", "no_grad"])
            x = torch.randn(5, 4, generator=seeded(hash((seed, step, rank))))
            outputs = []
            for model in models:
                model.train(kind != "eval")
                model.zero_grad()
                quiet = torch.no_grad() if kind in ("eval", "no_grad") else contextlib.nullcontext()
                with quiet, model.no_sync() if kind == "no_sync" else contextlib.nullcontext():
                    outputs.append(model(x))
                    if outputs[-1].requires_grad:
                        outputs[-1].backward()
            where = f"seed {seed} step {step} {kind} rank {rank}"
            assert torch.equal(*outputs), where
            want, got = (dict(model.named_buffers()) for model in models)
            assert want.keys() == got.keys()
            for name, buffer in want.items():
                assert torch.equal(buffer, got[name]), (where, name)


@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_buffers_are_those_of_rank_zero_when_they_are_in_torch(backend, world_size):
    first = random.SystemRandom().randrange(10**6)
    print(f"seeds from {first}")
    run_ranks(_buffers, world_size, backend, timeout=60, seeds=list(range(first, first + fewer(6))))


class _Branches(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(4))

    def forward(self, x: torch.Tensor, taken: list[int]) -> torch.Tensor:
        for index in taken:
            x = self.branches[index](x)
        return x.square().mean()


def _unused(rank: int, world_size: int, seeds: list[int]) -> None:
    gloo = dist.new_group(backend=backend_for("gloo"))
    for seed in seeds:
        rng = random.Random(seed * 10 + rank)  # ranks take different branches
        view = bool(seed % 2)
        models = [
            TorchDdp(_Branches(), process_group=gloo, find_unused_parameters=True, gradient_as_bucket_view=view),
            DistributedDataParallel(_Branches(), find_unused_parameters=True, bucket_cap_mb=1e-5),
        ]
        for step in range(4):
            taken = [rng.randrange(3) for _ in range(rng.randint(1, 3))]  # the last one never
            x = torch.randn(2, 3, generator=seeded(hash((seed, step, rank))))
            for model in models:
                model.zero_grad()
                model(x, taken).backward()
            for (name, want), got in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
                where = f"seed {seed} step {step} rank {rank} {name}"
                assert (want.grad is None) == (got.grad is None), where
                assert want.grad is None or torch.equal(want.grad, got.grad), where


def test_unused_parameters_are_found_as_in_torch():
    first = random.SystemRandom().randrange(10**6)
    print(f"seeds from {first}")
    run_ranks(_unused, 2, BACKENDS[-1], timeout=60, seeds=list(range(first, first + fewer(10))))


_DEVICES_THAT_ARE_REFUSED = (
    [
        ({"device_ids": [0]}, ValueError, r"device_ids=\[0\], output_device=None: expected None for both.*on the CPU"),
        ({"output_device": 1}, ValueError, "output_device=1: expected None for both"),
    ]
    if ON_CPU
    else [
        ({"device_ids": [99]}, ValueError, r"device_ids=\[99\]: expected the one device that the module is on"),
        ({"output_device": "cpu"}, ValueError, "output_device=cpu: expected the one device that the module is on"),
    ]
)


def _arguments(rank: int, world_size: int) -> None:
    own = _Branches()
    with torch.no_grad():
        own.branches[0].weight.fill_(rank)
    DistributedDataParallel(own, init_sync=False)
    assert own.branches[0].weight.unique().tolist() == [rank]
    model = DistributedDataParallel(copy.deepcopy(own), None, None, 0, True, True, None, 25, True, False, True, False)
    assert model.module.branches[0].weight.unique().tolist() == [0]
    for arguments, kind, message in (
        *_DEVICES_THAT_ARE_REFUSED,
        ({"dim": 1}, ValueError, "dim=1: expected 0"),
        ({"device_ids": dist.group.WORLD}, TypeError, "device_ids is a ProcessGroup: expected it by its name"),
        ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb=0: expected more than 0"),
        ({"bucket_cap_mb": float("inf")}, ValueError, "bucket_cap_mb=inf: expected more than 0, mebibytes"),
        ({"bucket_cap_mb": "25"}, ValueError, "bucket_cap_mb='25': expected more than 0, mebibytes"),
        ({"bucket_size": True}, ValueError, "bucket_size=True: expected a number of elements or 'auto'"),
        ({"bucket_size": 2.5}, ValueError, "bucket_size=2.5: expected a number of elements or 'auto'"),
        ({"check_for_large_grads": -1.0}, ValueError, "check_for_large_grads=-1.0: expected a 2-norm, or 0 for none"),
        ({"check_for_large_grads": "x"}, ValueError, "check_for_large_grads='x': expected a 2-norm, or 0 for none"),
        (
            {"expert_instance_process_group": dist.group.WORLD},
            ValueError,
            "expert_instance_process_group: expected expert_process_group with it",
        ),
        ({"bucket_cap_mb": 1, "bucket_size": 5}, ValueError, "bucket_cap_mb=1 and bucket_size=5: expected only one"),
        (
            {"find_unused_parameters": True, "unused_parameters": "error"},
            ValueError,
            "find_unused_parameters=True means unused_parameters='skip', not 'error'",
        ),
        (
            {"static_graph": True, "unused_parameters": "zero_fill"},
            ValueError,
            "static_graph=True means unused_parameters='skip', not 'zero_fill'",
        ),
        ({"mixed_precision": 1}, TypeError, "unexpected keyword argument 'mixed_precision'"),
        (
            {"process_group": dist.group.WORLD, "device_mesh": init_device_mesh(DEVICE, (2,))},
            ValueError,
            "process_group=.* and device_mesh=.*: expected only one of them",
        ),
        ({"device_mesh": init_device_mesh(DEVICE, (2, 1))}, ValueError, "device_mesh=.*: expected one dimension"),
    ):
        with pytest.raises(kind, match=message):
            DistributedDataParallel(_Branches(), **arguments)
    with pytest.raises(ValueError, match=r"parameter '0\.weight' is uninitialized: expected a forward before"):
        DistributedDataParallel(torch.nn.Sequential(torch.nn.LazyLinear(2)))
    hints = {"skip_all_reduce_unused_params": True, "batched_grad_copy": True, "lazy_bucket_allocation": True}
    model = DistributedDataParallel(_Branches(), device_ids=[], find_unused_parameters=True, **hints)
    assert (model.device_type, model.dim, model.device_ids, model.output_device) == (DEVICE, 0, None, None)
    for each in (model, DistributedDataParallel(_Branches(), use_distributed_optimizer=True)):
        each.module.branches[1].weight.data.fill_(rank)
        each.broadcast_params()
        assert each.module.branches[1].weight.unique().tolist() == [0]
    with model.no_sync():
        assert not model.is_last_microbatch
    for model.is_last_microbatch in (False, True):
        model.zero_grad()
        model(torch.full((2, 3), rank + 1.0), [0]).backward()
        grad = model.module.branches[0].weight.grad
        of_ranks = [torch.empty_like(grad) for _ in range(world_size)]
        dist.all_gather(of_ranks, grad)
        assert torch.equal(*of_ranks) == model.is_last_microbatch
    assert (model.find_unused_parameters, model.static_graph, model.gradient_as_bucket_view) == (True, False, False)


def _own_device(rank: int, world_size: int) -> None:
    device = torch.cuda.current_device()
    model = DistributedDataParallel(_Branches(), device_ids=[device], output_device=device)
    assert (model.device_ids, model.output_device) == ([device], device)
    assert model(torch.ones(2, 3, device="cpu"), [0, 1, 2, 3]).device == torch.device("cuda", device)


@pytest.mark.skipif(ON_CPU, reason="modules on the CPU take no devices")
def test_inputs_are_moved_to_the_modules_device():
    run_ranks(_own_device, 2, "gloo", timeout=60)


def test_torchs_arguments_are_taken_in_their_order_or_refused_by_name():
    run_ranks(_arguments, 2, "gloo", timeout=60)


def _forward_sync_buffers(rank: int, world_size: int) -> None:
    for in_forwards in (False, True):
        model = DistributedDataParallel(_Normed(), forward_sync_buffers=in_forwards, broadcast_buffers=not in_forwards)
        module = model.module.layers[1]
        module.running_mean.fill_(rank)
        model.eval()(torch.zeros(1, 4))
        assert module.running_mean.unique().tolist() == [0.0 if in_forwards else rank]
        model.forward_sync_buffers = not in_forwards
        module.running_mean.fill_(rank)
        model(torch.zeros(1, 4))
        assert module.running_mean.unique().tolist() == [rank if in_forwards else 0.0]
    module = _Normed()
    module.layers[1].running_mean.fill_(3.0 + rank)
    DistributedDataParallel(module, forward_sync_buffers=False)
    assert module.layers[1].running_mean.unique().tolist() == [3.0]
    for default in ({}, {"broadcast_buffers": None}):  # torch 2.15's
        module.layers[1].running_mean.fill_(3.0 + rank)
        model = DistributedDataParallel(module, **default)
        assert model.broadcast_buffers is True
        assert module.layers[1].running_mean.unique().tolist() == [3.0]


def test_forward_sync_buffers_is_about_forwards_alone_and_none_is_the_default():
    run_ranks(_forward_sync_buffers, 2, "gloo", timeout=60)
