"""torch's own data parallelism: DDP, FSDP2, ZeroRedundancyOptimizer, distributed checkpoints."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class _Branches(nn.Module):
    """The second branch is used in odd steps only."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x, both=True):
        y = self.first(x)
        return self.last(torch.relu(y + self.second(x) if both else y))


def _model():
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)
    )


def _batch(rank, step):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def _train(model, rank, optimizer=None, steps=4, **inputs):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(_batch(rank, step), **{key: value(step) for key, value in inputs.items()}).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def _state(model):
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def ddp(rank, world_size, folder):
    model = DistributedDataParallel(_model(), bucket_cap_mb=0.002)
    losses = _train(model, rank)
    with model.no_sync():
        _train(model, rank, torch.optim.SGD(model.parameters(), lr=0.0), steps=1)
    losses += _train(model, rank, steps=1)
    return losses, _state(model)


def ddp_hooks(rank, world_size, folder):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    states = []
    for hook in (default_hooks.fp16_compress_hook, default_hooks.bf16_compress_hook, default_hooks.allreduce_hook):
        model = DistributedDataParallel(_model())
        model.register_comm_hook(None, hook)
        _train(model, rank)
        states.append(_state(model))
    model = DistributedDataParallel(_model())
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    _train(model, rank)
    return states, _state(model)


def ddp_graphs(rank, world_size, folder):
    torch.manual_seed(6)
    static = DistributedDataParallel(_Branches(), static_graph=True)
    _train(static, rank, both=lambda step: False)
    torch.manual_seed(6)
    unused = DistributedDataParallel(_Branches(), find_unused_parameters=True)
    _train(unused, rank, both=lambda step: step % 2 == 1)
    model = DistributedDataParallel(nn.SyncBatchNorm.convert_sync_batchnorm(nn.Linear(8, 4)))
    uneven = []
    with model.join():  # rank 1 has more batches than rank 0
        for step in range(2 + rank):
            loss = model(_batch(rank, step)).mean()
            loss.backward()
            uneven.append(loss.detach())
    return _state(static), _state(unused), uneven


def zero_optimizer(rank, world_size, folder):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = DistributedDataParallel(_model())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.01)
    _train(model, rank, optimizer)
    optimizer.consolidate_state_dict(to=0)
    moments = [s["exp_avg"] for s in optimizer.state_dict()["state"].values()] if rank == 0 else []
    return _state(model), moments


def _sharded():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(7)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)], nn.Linear(8, 4))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def fsdp(rank, world_size, folder):
    model = _sharded()
    losses = _train(model, rank, torch.optim.AdamW(model.parameters(), lr=0.01))
    return losses, [p.full_tensor().detach() for p in model.parameters()]


def checkpoint(rank, world_size, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = _sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    _train(model, rank, optimizer)
    before = [p.full_tensor().detach() for p in model.parameters()]
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/checkpoint")
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/checkpoint")
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    after = [p.full_tensor().detach() for p in model.parameters()]
    assert all(map(torch.equal, before, after))
    _train(model, rank, optimizer, steps=1)
    return after, [p.full_tensor().detach() for p in model.parameters()]
