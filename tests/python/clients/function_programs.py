"""Collectives as functions: inside autograd, functional, compiled; and those of Python objects."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist


def autograd_functions(rank, world_size, folder):
    import torch.distributed.nn.functional as nnf

    results = []

    def run(function, has_output=True):
        x = torch.arange(1.0, 7.0).mul(rank + 1).requires_grad_()
        out = function(x)
        outs = list(out) if isinstance(out, (tuple, list)) else [out]
        loss = sum((o * (i + 1)).square().sum() for i, o in enumerate(outs) if o is not None)
        loss.backward()
        results.extend([*(o.detach() for o in outs if o is not None and has_output), x.grad])

    run(lambda x: nnf.all_reduce(x * 2))
    run(lambda x: nnf.broadcast(x * 1, 1))
    run(lambda x: nnf.all_gather(x * 1))
    run(lambda x: nnf.reduce(x * 1, 0), has_output=rank == 0)  # elsewhere gloo leaves parts of the sum
    run(lambda x: nnf.reduce_scatter(torch.empty(3), list((x * 1).chunk(world_size))))
    run(lambda x: nnf.all_to_all_single(torch.empty(6), x * 1))
    run(lambda x: nnf.gather(x * 1, 0))
    run(lambda x: nnf.scatter(list((x * 1).chunk(world_size)), 1))
    return results


def functional_collectives(rank, world_size, folder):
    import torch.distributed._functional_collectives as fc

    group = dist.group.WORLD
    x = torch.arange(8.0) + rank
    results = [
        fc.all_reduce(x, "sum", group),
        fc.all_reduce(x, "max", group),
        fc.all_gather_tensor(x, 0, group),
        fc.reduce_scatter_tensor(x, "sum", 0, group),
        fc.all_to_all_single(x, None, None, group),
        fc.broadcast(x, 1, group),
        *fc.all_reduce_coalesced([x, x + 1], "sum", group),
        *fc.all_gather_into_tensor_coalesced([x, x + 1], group),
        *fc.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [0, 0], group),
    ]
    images = torch.arange(2 * 4 * 3 * 5.0).view(2, 4, 3, 5).contiguous(memory_format=torch.channels_last) + rank
    if not torch.__version__.startswith("2.11."):  # which takes contiguous tensors only
        results.append(fc.all_gather_tensor(images, 1, group))
    y = x.clone().requires_grad_()
    fc.all_gather_tensor_autograd(y, 0, group).square().sum().backward()
    z = x.clone().requires_grad_()
    fc.reduce_scatter_tensor_autograd(z, "sum", 0, group).square().sum().backward()
    return [r.clone() for r in results] + [y.grad, z.grad]


def compiled(rank, world_size, folder, backend="aot_eager"):
    import torch.distributed._functional_collectives as fc

    @torch.compile(fullgraph=True, backend=backend)
    def step(x):
        y = fc.all_reduce(x.sin(), "sum", dist.group.WORLD)
        dist.all_reduce(y)
        gathered = torch.empty(y.numel() * world_size)
        dist.all_gather_into_tensor(gathered, y)
        return fc.reduce_scatter_tensor(gathered * 2, "sum", 0, dist.group.WORLD).cos()

    return [step(torch.arange(6.0) + rank + i) for i in range(3)]


def compiled_to_code(rank, world_size, folder):
    """By inductor, whose code calls collectives in buffers that it uses again."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(folder).parent / "code")
    return compiled(rank, world_size, folder, "inductor")


def objects(rank, world_size, folder):
    mine = {"rank": rank, "text": "x" * 1000 * rank, "tensor": [1.0] * rank}
    everybody = [None] * world_size
    dist.all_gather_object(everybody, mine)
    at_one = [None] * world_size if rank == 1 else None
    dist.gather_object(mine, at_one, dst=1)
    box = [mine, "second"] if rank == 0 else [None, None]
    dist.broadcast_object_list(box, src=0)
    part = [None]
    dist.scatter_object_list(part, [f"for {r}" for r in range(world_size)] if rank == 1 else None, src=1)
    passed = [mine, None]
    if rank == 0:
        dist.send_object_list(passed, 1)
    elif rank == 1:
        dist.recv_object_list(passed, 0)
    return everybody, at_one, box, part, passed


def checked(rank, world_size, folder):
    """Under the debug level DETAIL, which wraps the backend and compares what the ranks call."""
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    x = torch.arange(5.0) + rank
    dist.all_reduce(x)
    outputs = [torch.empty(5) for _ in range(world_size)]
    dist.all_gather(outputs, x)
    flat = torch.empty(10)
    dist.all_gather_into_tensor(flat, x)
    into = torch.empty(5)
    for work in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x + rank, 1 - rank), dist.P2POp(dist.irecv, into, 1 - rank)]
    ):
        work.wait()
    dist.group.WORLD.monitored_barrier()
    try:
        dist.all_reduce(torch.zeros(3 + rank))
        error = "none"
    except RuntimeError as failure:
        error = "mismatch" if "mismatch" in str(failure) else str(failure)
    if dist.get_backend() == "farandole":
        import farandole

        assert farandole.transport_report()[rank] == "self"
    return x, outputs, flat, into, error


def checked_clients(rank, world_size, folder):
    """DDP, a second group, and messages in both, under the debug level DETAIL."""
    from torch.nn.parallel import DistributedDataParallel

    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    torch.manual_seed(4)
    model = torch.nn.Linear(4, 3)
    is_gloo = dist.get_backend() == "gloo"  # under which torch 2.15's DDP crashes at this level
    copies = model if is_gloo else DistributedDataParallel(model)
    for step in range(3):
        copies(torch.arange(8.0).view(2, 4) + rank + step).square().mean().backward()
    for p in model.parameters() if is_gloo else ():
        dist.all_reduce(p.grad)
        p.grad /= world_size
    group = dist.new_group()
    x, into = torch.full((5,), float(rank)), [torch.zeros(5), torch.zeros(5)]
    for place, here in zip(into, (group, None)):
        if rank == 0:
            dist.send(x + 7, 1, group=here, tag=2)
            dist.recv(place, 1, group=here, tag=3)
        else:
            dist.recv(place, 0, group=here, tag=2)
            dist.send(x + 9, 0, group=here, tag=3)
    dist.all_reduce(x, group=group)
    return [p.grad for p in model.parameters()], x, into
