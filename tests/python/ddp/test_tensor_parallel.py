"""Models that torch's tensor parallelism shards over one dimension of a mesh, averaged over the other one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as TorchDdp
from torch.utils.checkpoint import checkpoint

from farandole.ddp import DistributedDataParallel, DistributedOptimizer
from support.devices import DEVICE
from support.processes import run_ranks

SHARDED = ["up.weight", "up.bias", "down.weight"]
STEPS = 3


class _Model(nn.Module):
    def __init__(self, recomputes: str = "") -> None:
        super().__init__()
        torch.manual_seed(8)
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.recomputes = recomputes

    def _feed_forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(inputs)))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        normed = self.norm(inputs)
        if self.recomputes:
            return inputs + checkpoint(self._feed_forward, normed, use_reentrant=self.recomputes == "reentrant")
        return inputs + self._feed_forward(normed)


def _mesh() -> DeviceMesh:
    return init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replicas", "shards"))


def _sharded(mesh: DeviceMesh, model: nn.Module | None = None) -> nn.Module:
    module = _Model() if model is None else model
    return parallelize_module(module, mesh["shards"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _inputs(step: int, replica: int) -> torch.Tensor:
    return torch.linspace(-1.0, 1.0 + step, 24).reshape(4, 6).roll(replica, dims=1).to(DEVICE)


def _loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().mul(torch.arange(6)).mean()


def _reference(max_norm: float | None = None) -> tuple[nn.Module, list[float]]:
    """In one process, over both replicas' inputs."""
    model = _Model().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms = []
    for step in range(STEPS):
        optimizer.zero_grad()
        sum(_loss(model(_inputs(step, replica))) / 2 for replica in range(2)).backward()
        if max_norm is not None:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return model, norms


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.state_dict()
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}


def _like_torchs(rank: int, world_size: int) -> None:
    mesh = _mesh()
    grads = []
    for kind in (TorchDdp, DistributedDataParallel):
        model = kind(_sharded(mesh), device_mesh=mesh["replicas"])
        parameters = list(model.parameters())
        for step in range(2):
            _loss(model(_inputs(step, rank // 2))).backward()
        grads.append([parameter.grad for parameter in parameters])
    for want, got in zip(*grads, strict=True):
        assert torch.equal(want, got)


def test_gradients_are_averaged_as_by_torch():
    run_ranks(_like_torchs, 4, "gloo", timeout=60)


def _norms(rank: int, world_size: int) -> None:
    mesh = _mesh()
    shards = mesh["shards"].get_group()
    reference, want = _reference(0.1)
    for options in (
        {"use_distributed_optimizer": True},
        {"use_distributed_optimizer": True, "overlap_param_gather": True},
        {},
    ):
        model = DistributedDataParallel(_sharded(mesh), device_mesh=mesh["replicas"], bucket_size=40, **options)
        optimizer = DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.5),
            model,
            model_parallel_group=shards,
            tensor_parallel_group=shards,
        )
        for step in range(STEPS):
            optimizer.zero_grad()
            _loss(model(_inputs(step, rank // 2))).backward()
            assert optimizer.clip_grad_norm_(0.1).item() == pytest.approx(want[step], rel=1e-5)
            optimizer.step()
        for name, value in _whole(model.module).items():
            torch.testing.assert_close(value, reference.state_dict()[name])


def test_clips_by_the_norm_of_the_whole_model_without_marks():
    run_ranks(_norms, 4, "gloo", timeout=60)


def _parameters(rank: int, world_size: int) -> None:
    mesh = _mesh()
    module = _sharded(mesh)
    module.up.bias.requires_grad_(False)
    module.down.weight.mark = "kept"
    module.again = module.up  # has two names
    names = [name for name, _ in module.named_parameters()]
    model = DistributedDataParallel(module, device_mesh=mesh["replicas"])
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        model(_inputs(0, 0))
    assert module.down.weight.mark == "kept"
    assert not module.up.bias.requires_grad
    for _ in range(2):
        _loss(model(_inputs(0, rank // 2))).backward()
        again = dict(module.named_parameters())
        assert list(again) == names
        for name, parameter in again.items():
            assert parameter is parameters[name] is module.get_parameter(name)
            assert not isinstance(parameter, DTensor)
            assert getattr(parameter, "tensor_model_parallel", False) == (name in SHARDED)
            assert (parameter.grad is None) == (name == "up.bias")
    with pytest.raises(RuntimeError, match=r"mat1 and mat2|shape"):
        model(torch.ones(2, 5, device=DEVICE))
    assert not isinstance(module.up.weight, DTensor)
    state = module.state_dict()
    assert isinstance(state["up.weight"], DTensor) and isinstance(state["again.weight"], DTensor)


def test_the_parts_stay_the_models_parameters():
    run_ranks(_parameters, 4, "gloo", timeout=60)


def _recomputes(rank: int, world_size: int, how: str) -> None:
    mesh = _mesh()
    reference, _ = _reference()
    model = DistributedDataParallel(_sharded(mesh, _Model(how)), device_mesh=mesh["replicas"])
    copied = copy.deepcopy(model.module)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(model(_inputs(step, rank // 2))).backward()
        optimizer.step()
    for name, value in _whole(model.module).items():
        torch.testing.assert_close(value, reference.state_dict()[name])
    # A copy has shards of its own.
    torch.testing.assert_close(copied(_inputs(0, 0)), _Model().to(DEVICE)(_inputs(0, 0)))
    copied.load_state_dict(model.module.state_dict())
    torch.testing.assert_close(copied(_inputs(0, 0)), reference(_inputs(0, 0)))


@pytest.mark.parametrize("how", ["", "reentrant", "not reentrant"])
def test_trains_with_checkpoints_and_copies(how):
    run_ranks(_recomputes, 4, "gloo", how=how)


def _checkpoint(rank: int, world_size: int, path: str) -> None:
    mesh = _mesh()
    trained = DistributedDataParallel(_sharded(mesh), device_mesh=mesh["replicas"], use_distributed_optimizer=True)
    optimizer = DistributedOptimizer(torch.optim.SGD(trained.parameters(), lr=0.5), trained)
    _loss(trained(_inputs(0, rank // 2))).backward()
    optimizer.step()
    state = trained.module.state_dict()
    assert [name for name, value in state.items() if isinstance(value, DTensor) and value.placements[0].is_shard()] == [
        name for name in state if name in SHARDED
    ]
    dcp.save({"model": state}, checkpoint_id=path)

    # By another number of shards, wrapped and not.
    wanted = _whole(trained.module)
    for module in (
        parallelize_module(
            _Model(), init_device_mesh(DEVICE, (4,)), {"up": ColwiseParallel(), "down": RowwiseParallel()}
        ),
        DistributedDataParallel(_sharded(mesh), device_mesh=mesh["replicas"]).module,
    ):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        loaded: dict[str, Any] = {"model": module.state_dict()}
        dcp.load(loaded, checkpoint_id=path)
        module.load_state_dict(loaded["model"])
        for name, value in _whole(module).items():
            assert torch.equal(value, wanted[name]), name
    dist.barrier()


def test_state_dicts_have_what_others_shard_too(tmp_path):
    run_ranks(_checkpoint, 4, "gloo", path=str(tmp_path))


def _without_mesh(rank: int, world_size: int) -> None:
    mesh = _mesh()
    with pytest.raises(ValueError, match=r"parameter 'up.weight' is a DTensor over .*: expected device_mesh="):
        DistributedDataParallel(_sharded(mesh), process_group=mesh["replicas"].get_group())


def test_shards_without_their_mesh_are_refused():
    run_ranks(_without_mesh, 4, "gloo", timeout=60)


def _compiled(rank: int, world_size: int) -> None:
    mesh = _mesh()
    reference, _ = _reference()
    model = DistributedDataParallel(_sharded(mesh), device_mesh=mesh["replicas"])
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(STEPS):
        optimizer.zero_grad()
        _loss(compiled(_inputs(step, rank // 2))).backward()
        optimizer.step()
    for name, value in _whole(model.module).items():
        torch.testing.assert_close(value, reference.state_dict()[name])


@pytest.mark.skipif(
    torch.__version__ < "2.12", reason="torch 2.11 compiles no DTensor of a part, under its own DDP either"
)
def test_trains_compiled():
    run_ranks(_compiled, 4, "gloo", timeout=120)
