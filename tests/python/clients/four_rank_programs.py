"""Programs of torch.distributed that need four ranks, or parts of a world."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from clients.data_parallel_programs import _train


def _layers():
    torch.manual_seed(8)
    return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(2)], nn.Linear(8, 4))


def sharded(mesh, **options):
    from torch.distributed.fsdp import fully_shard

    model = _layers()
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def reloaded(model, where):
    """The weights, once they were zero and loaded from a checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=where)
    set_model_state_dict(model, state["model"])
    return [p.full_tensor().detach() for p in model.parameters()]


def hybrid_shards(rank, world_size, folder):
    """FSDP2 with replicas of shards, in float32 and in mixed precision."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    results = []
    for options in ({}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}):
        model = sharded(mesh, **options)
        losses = _train(model, rank, torch.optim.AdamW(model.parameters(), lr=0.01), steps=3)
        results.append(([loss.float() for loss in losses], [p.full_tensor().detach() for p in model.parameters()]))
    return results


def resharded_checkpoint(rank, world_size, folder):
    """Saved in the background by four shards, loaded by two replicas of two."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh

    model = sharded(init_device_mesh("cpu", (4,)))
    _train(model, rank, torch.optim.SGD(model.parameters(), lr=0.1), steps=1)
    before = [p.full_tensor().detach() for p in model.parameters()]
    # The thread that saves calls collectives of its own, in a group of its own.
    saver = dist.new_group(backend=dist.get_backend())
    where = f"{folder}/resharded"
    saving = dcp.async_save({"model": get_model_state_dict(model)}, checkpoint_id=where, process_group=saver)
    x = torch.ones(10)
    dist.all_reduce(x)  # meanwhile
    saving.result()
    dist.barrier()
    other = sharded(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards")))
    after = reloaded(other, where)
    assert all(map(torch.equal, before, after))
    return x, after


def uneven_autograd(rank, world_size, folder):
    import torch.distributed._functional_collectives as fc
    import torch.distributed.nn.functional as nnf

    # Rank a gives rank b a + 2 * b rows.
    gives, takes = [rank + 2 * b for b in range(world_size)], [a + 2 * rank for a in range(world_size)]
    x = torch.arange(sum(gives) * 3.0).view(-1, 3).add(rank).requires_grad_()
    out = fc.all_to_all_single_autograd(x, takes, gives, dist.group.WORLD)
    (out * (torch.arange(out.numel()).view(out.shape) + rank)).sum().backward()
    y = torch.arange(8.0).add(rank).requires_grad_()
    if dist.get_backend() == "gloo":  # which has no all_to_all of lists
        parts = nnf.all_to_all_single(torch.empty(8), y * 1).chunk(world_size)
    else:
        parts = nnf.all_to_all([torch.empty(2) for _ in range(world_size)], list((y * 1).chunk(world_size)))
    sum((part * (r + 1 + rank)).square().sum() for r, part in enumerate(parts)).backward()
    return out.detach().clone(), x.grad, [part.detach().clone() for part in parts], y.grad


def compiled_on_a_part(rank, world_size, folder):
    import torch.distributed._functional_collectives as fc

    parts = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = parts[rank % 2]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x):
        return fc.all_gather_tensor(fc.all_reduce(x.sin(), "sum", mine) * 2, 0, mine).cos()

    return [step(torch.arange(6.0) + rank + i) for i in range(2)]


def newer_names(rank, world_size, folder):
    """What torch 2.15 calls the collectives of one tensor."""
    if not hasattr(dist, "all_gather_single"):
        return None
    x, whole, part = torch.arange(8.0) + rank, torch.empty(32), torch.empty(2)
    dist.all_gather_single(whole, x)
    dist.reduce_scatter_single(part, x)
    with dist._coalescing_manager(async_ops=True) as manager:
        many = [torch.empty(32), torch.empty(32)]
        dist.all_gather_single(many[0], x)
        dist.all_gather_single(many[1], x + 1)
    manager.wait()
    return whole, part, many
