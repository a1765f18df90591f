"""Stages that are tensor parallel: what they hand over is not in a tensor's own memory, and gradients are those of one
process.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
from torch import nn

from farandole.pipelining import PipelineStage, Schedule1F1B, get_schedule_class, plan
from pipelining.pipeline_support import BACKENDS, train_alone
from support.devices import DEVICE
from support.processes import run_ranks

RANKS, SHARDS, WIDTH, N = 2, 2, 8, 4
SINGLE = ["GPipe", "1F1B", "ZB-H1"]
MULTI = ["Interleaved1F1B", "InterleavedZeroBubble", "ZBV", "DualPipeV"]


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.down(torch.tanh(self.up(x)))


class _Named(nn.Module):
    """Hands over a structure that holds its tensor."""

    def __init__(self, module: nn.Module, is_first: bool, is_last: bool):
        super().__init__()
        self.module, self.is_first, self.is_last = module, is_first, is_last

    def forward(self, given: Any) -> Any:
        y = self.module(given if self.is_first else given["y"])
        return y if self.is_last else {"y": y, "count": 3}


def _meshes() -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(DEVICE, (RANKS, SHARDS), mesh_dim_names=("pipeline", "shards"))


def _parallelize(module: nn.Module, mesh: Any, layout: Any, gives_dtensor: bool) -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    down = RowwiseParallel(output_layouts=layout, use_local_output=not gives_dtensor)
    parallelize_module(module, mesh, {"up": ColwiseParallel(input_layouts=layout), "down": down})


def _train(rank: int, world_size: int, seed: int) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    meshes = _meshes()
    mesh, place = meshes["shards"], meshes["pipeline"].get_local_rank()
    rng = random.Random(seed)
    for name in rng.sample(SINGLE + MULTI, 4):
        layout = rng.choice([Replicate(), Shard(0), Shard(1)])
        gives_dtensor, is_named, gets_mesh, declares = (rng.random() < share for share in (0.5, 0.3, 0.5, 0.5))
        where = (
            f"seed {seed}, {name}, {layout}, gives_dtensor={gives_dtensor}, is_named={is_named}, declares={declares}, "
            f"rank {rank}"
        )
        example = distribute_tensor(torch.zeros(4, WIDTH), mesh, [layout])
        example = example if gives_dtensor else example.to_local()
        num_stages = RANKS * (1 if name in SINGLE else 2)
        torch.manual_seed(seed)
        modules: list[Any] = [_Mlp() for _ in range(num_stages)]
        plain = copy.deepcopy(modules)
        owners = plan(name, num_stages, N, num_ranks=RANKS).rank_of_stage
        stages = []
        for index, owner in enumerate(owners):
            if owner == place:
                _parallelize(modules[index], mesh, layout, gives_dtensor)
                module = _Named(modules[index], index == 0, index == num_stages - 1) if is_named else modules[index]
                given: dict[str, Any] = {"get_mesh": lambda names, _: meshes[names]} if gets_mesh else {}
                if declares and not is_named:
                    given.update(input_args=example, output_args=(example,))
                stages.append(
                    PipelineStage(module, index, num_stages, DEVICE, group=meshes["pipeline"].get_group(), **given)
                )

        def loss_fn(output: Any, target: Any) -> Any:
            return (output - target).square().sum()

        schedule = get_schedule_class(name)(stages[0] if name in SINGLE else stages, N, loss_fn, scale_grads=False)
        for _ in range(2):
            batch, target = torch.randn(4 * N, WIDTH), torch.randn(4 * N, WIDTH)
            alone, losses_alone, output_alone = train_alone(plain, loss_fn, batch, target, N, scale=False)
            for stage in stages:
                stage.submod.zero_grad()
            x, y = distribute_tensor(batch, mesh, [layout]), distribute_tensor(target, mesh, [layout])
            losses: list[Any] = []
            output = schedule.step(
                x if gives_dtensor else x.to_local(), target=y if gives_dtensor else y.to_local(), losses=losses
            )
            for stage in stages:
                grads = {key: value.grad for key, value in modules[stage.stage_index].named_parameters()}
                for key, other in alone[stage.stage_index].named_parameters():
                    actual = grads[key]
                    assert isinstance(actual, DTensor), f"{where}: {key}"
                    error = (actual.full_tensor() - other.grad).abs().max()
                    assert error <= 1e-5 * other.grad.abs().max(), f"{where}: {key} of {stage.stage_index}: {error}"
            if owners[-1] != place:
                continue
            if gives_dtensor:
                assert torch.allclose(sum(losses), sum(losses_alone), rtol=1e-5), where
                assert isinstance(output, DTensor) and torch.allclose(output.full_tensor(), output_alone, atol=1e-5), (
                    where
                )
            else:
                whole = DTensor.from_local(torch.as_tensor(output), mesh, [layout]).full_tensor()
                assert torch.allclose(whole, output_alone, atol=1e-5), where
        output = schedule.eval(x if gives_dtensor else x.to_local())
        if owners[-1] == place:
            whole = (
                output if isinstance(output, DTensor) else DTensor.from_local(torch.as_tensor(output), mesh, [layout])
            )
            assert torch.allclose(whole.full_tensor(), output_alone, atol=1e-5), where


@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_tensor_parallel_stages_are_those_of_one_process(backend: str) -> None:
    seed = random.SystemRandom().randrange(10**9)
    print(f"seed {seed}")
    run_ranks(_train, RANKS * SHARDS, backend, timeout=150, seed=seed)


class _Elsewhere(torch.Tensor):
    """A tensor of a class that keeps its numbers in another one."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class _Returns(nn.Linear):
    what: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        y = super().forward(x)
        return y if self.what is None else self.what(y)


class _Holder:
    def __init__(self, tensor: Any):
        self.tensor = tensor


def _step_fails(schedule: Any, message: str) -> None:
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    for step in (schedule.step, schedule.eval):
        with pytest.raises((RuntimeError, TypeError), match=message):
            step(x, target=y)


def _refuse_unknown(rank: int, world_size: int) -> None:
    """In a process that has no DTensors."""
    module = _Returns(WIDTH, WIDTH)
    schedule = Schedule1F1B(PipelineStage(module, rank, world_size, DEVICE), 2, nn.MSELoss())
    if rank == 0:
        module.what = lambda tensor: _Elsewhere(tensor.detach())
    _step_fails(schedule, "TypeError: .*returned a _Elsewhere, expected a torch.Tensor or a DTensor")
    module.what = None
    schedule.step(torch.randn(4, WIDTH), target=torch.randn(4, WIDTH))


def _refuse(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    mesh = init_device_mesh(DEVICE, (1, world_size), mesh_dim_names=("shards", "pipeline"))["shards"]
    module = _Returns(WIDTH, WIDTH)
    schedule = Schedule1F1B(PipelineStage(module, rank, world_size, DEVICE), 2, nn.MSELoss())
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)

    def dtensor(tensor: torch.Tensor) -> Any:
        return DTensor.from_local(tensor, mesh, [Replicate()])

    for what, message in (
        (lambda tensor: _Holder(dtensor(tensor)), "a DTensor is inside another object, expected it in tuples"),
        (
            dtensor,
            r"a DTensor arrived on a mesh with the dimensions \('shards',\) of sizes \(1,\), .* expected get_mesh",
        ),
    ):
        module.what = what if rank == 0 else None
        _step_fails(schedule, message)
    module.what = None
    schedule.step(x, target=y)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_has_no_memory_to_send_is_an_error_of_all_ranks(backend: str) -> None:
    for refuse in (_refuse_unknown, _refuse):
        run_ranks(refuse, 2, backend)
