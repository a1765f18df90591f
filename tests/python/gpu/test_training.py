"""torch's DDP and FSDP2 over CUDA tensors: the same losses and weights as over torch's NCCL."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from support.gpus import needs_gpu, run_on_gpus

pytestmark = [needs_gpu, pytest.mark.timeout(300)]


def _model():
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 8)).cuda()


def _train(model, rank, steps=6):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        batch = torch.randn(16, 64, generator=torch.Generator().manual_seed(100 * step + rank)).cuda()
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _state(model):
    """As lists: tensors of another process would need it to live on."""
    state = {}
    for name, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        state[name.removeprefix("module.")] = whole.flatten().tolist()
    return state


def _ddp(rank, world_size):
    model = nn.parallel.DistributedDataParallel(_model(), device_ids=[torch.cuda.current_device()], bucket_cap_mb=0.1)
    losses = _train(model, rank)
    with model.no_sync():
        model(torch.ones(2, 64, device="cuda")).sum().backward()
    return losses, _state(model)


def _farandoles_ddp(rank, world_size):
    from farandole.ddp import DistributedDataParallel

    model = DistributedDataParallel(_model())
    return _train(model, rank), _state(model)


def _fsdp2(rank, world_size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cuda", (world_size,))
    model = _model()
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    losses = _train(model, rank)
    return losses, _state(model)


def _compare(ours, theirs):
    """Within the rounding of float: the two may add in different orders."""
    for (our_losses, our_state), (their_losses, their_state) in zip(ours, theirs):
        assert our_losses == pytest.approx(their_losses, rel=1e-4)
        assert our_state.keys() == their_state.keys()
        for name, values in our_state.items():
            assert torch.tensor(values).allclose(torch.tensor(their_state[name]), rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("program", [_ddp, _fsdp2], ids=["DDP", "FSDP2"])
def test_training_goes_as_over_nccl(world, program):
    _compare(run_on_gpus(program, world), run_on_gpus(program, world, backend="nccl"))


def test_farandoles_own_ddp_trains_as_torchs_does(world):
    _compare(run_on_gpus(_farandoles_ddp, world), run_on_gpus(_ddp, world, backend="nccl"))


def _functional(rank, world_size):
    import torch.distributed._functional_collectives as functional

    x = functional.all_reduce(torch.full((100,), float(rank + 1), device="cuda"), "sum", dist.group.WORLD)
    y = functional.all_gather_tensor(torch.full((3,), float(rank), device="cuda"), 0, dist.group.WORLD)
    return x.sum().item(), y.tolist()


def test_functional_collectives_go_through_it(world):
    total = 100.0 * world.size * (world.size + 1) / 2
    gathered = [float(r) for r in range(world.size) for _ in range(3)]
    assert run_on_gpus(_functional, world) == [(total, gathered)] * world.size
