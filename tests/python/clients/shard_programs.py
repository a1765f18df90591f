"""FSDP2's options, and checkpoints that other processes write."""

from __future__ import annotations

import multiprocessing

import torch
import torch.distributed as dist

from clients.data_parallel_programs import _batch, _train
from clients.four_rank_programs import reloaded, sharded


def _losses_and_weights(model, losses):
    return [loss.float() for loss in losses], [p.full_tensor().detach() for p in model.parameters()]


def _sharded(**options):
    from torch.distributed.device_mesh import init_device_mesh

    return sharded(init_device_mesh("cpu", (dist.get_world_size(),)), **options)


def fsdp_kept_whole(rank, world_size, folder):
    """Parameters that stay whole between forward and backward, that are sharded over fewer ranks meanwhile, and that are
    cut along another dimension."""
    from torch.distributed.tensor import Shard

    results = []
    for options in (
        {"reshard_after_forward": False},
        {"reshard_after_forward": 2},
        {"shard_placement_fn": lambda parameter: Shard(1) if parameter.dim() == 2 else Shard(0)},
    ):
        model = _sharded(**options)
        results.append(_losses_and_weights(model, _train(model, rank, steps=2)))
    return results


def fsdp_accumulated(rank, world_size, folder):
    """Gradients accumulated with and without a reduction, clipped by their norm, parameters gathered ahead."""
    from torch.distributed.fsdp import FSDPModule

    model = _sharded()
    layers = [layer for layer in model if isinstance(layer, FSDPModule)]
    for layer, following in zip(layers, layers[1:]):
        layer.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([layer])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        for microbatch in range(3):
            model.set_requires_gradient_sync(microbatch == 2)
            model.set_is_last_backward(microbatch == 2)
            model(_batch(rank, 3 * step + microbatch)).square().mean().backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor())
        optimizer.step()
    handle = model.unshard(async_op=True)
    if handle is not None:
        handle.wait()
    whole = [p.detach().clone() for p in model.parameters()]
    model.reshard()
    return norms, whole, [p.full_tensor().detach() for p in model.parameters()]


def checkpoint_by_a_process(rank, world_size, folder):
    """Saved by a process beside each rank, which has a group of its own; loaded from rank 0's file to all."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    model = _sharded()
    _train(model, rank, steps=1)
    before = [p.full_tensor().detach() for p in model.parameters()]
    where = f"{folder}/by_a_process"
    multiprocessing.current_process()._config["daemon"] = False  # a rank of these tests, which may have no child else
    saving = dcp.async_save(
        {"model": get_model_state_dict(model)},
        checkpoint_id=where,
        async_checkpointer_type=AsyncCheckpointerType.PROCESS,
    )
    x = torch.ones(10)
    dist.all_reduce(x)  # meanwhile
    saving.result()
    dist.barrier()
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert all(map(torch.equal, before, reloaded(model, where)))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole if rank == 0 else {}, options=options)
    given = [p.full_tensor().detach() for p in model.parameters()]
    assert all(map(torch.equal, before, given))
    return x, given
