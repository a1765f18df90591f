"""Lists whose tensors have their dimensions in memory in different orders, on one rank and between ranks."""

import random

import pytest
import torch
import torch.distributed as dist

from support.devices import only_on_cpu
from support.hosts import PretendHost
from support.processes import run_ranks

NAMES = ["all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"]


def _ordered(tensor, rng):
    """The same values, in one of four orders in memory."""
    orders = [torch.contiguous_format, torch.channels_last, None, None]
    order = rng.choice(orders)
    if order is not None:
        return tensor.contiguous(memory_format=order)
    dims = rng.sample(range(4), 4)
    return tensor.permute(dims).contiguous().permute([dims.index(i) for i in range(4)])


def _call(name, root, single, listed, is_async):
    """`single` and `listed`: the tensor and the list of the call, of all_to_all two lists."""
    rank = dist.get_rank()
    on_root = listed if rank == root else None
    work = {
        "all_gather": lambda: dist.all_gather(listed, single, async_op=is_async),
        "gather": lambda: dist.gather(single, on_root, root, async_op=is_async),
        "scatter": lambda: dist.scatter(single, on_root, root, async_op=is_async),
        "reduce_scatter": lambda: dist.reduce_scatter(single, listed, async_op=is_async),
        "all_to_all": lambda: dist.all_to_all(listed, single, async_op=is_async),
    }[name]()
    if is_async:
        work.wait()


def _run(rank, world_size, seed):
    rng = random.Random(seed)
    for case in range(100):
        name, is_async = rng.choice(NAMES), rng.random() < 0.5
        root, shape = rng.randrange(world_size), rng.choice([(2, 3, 4, 5), (1, 2, 1, 3), (3, 7, 20, 20)])
        values = torch.randint(0, 100, (world_size, world_size, *shape), generator=torch.Generator().manual_seed(case))
        values = values.to(rng.choice([torch.float32, torch.int64, torch.uint8]))
        own = random.Random(rng.random() + rank)
        if name in ("all_gather", "gather"):
            given, into = [values[rank, 0]], list(torch.zeros_like(values[0]))
            expected = list(values[:, 0]) if name == "all_gather" or rank == root else into
        elif name == "all_to_all":
            given, into, expected = list(values[rank]), list(torch.zeros_like(values[0])), list(values[:, rank])
        else:
            given, into = list(values[rank]), [torch.zeros_like(values[0, 0])]
            expected = [values[root, rank] if name == "scatter" else values.sum(0, dtype=values.dtype)[rank]]
        given = [_ordered(tensor, own) for tensor in given]
        kept = [tensor.clone() for tensor in given]
        into = [_ordered(tensor, own) for tensor in into]
        strides = [tensor.stride() for tensor in into]
        if name == "all_to_all":
            single, listed = given, into
        else:
            single, listed = (given[0], into) if name in ("all_gather", "gather") else (into[0], given)
        _call(name, root, single, listed, is_async)
        where = f"seed {seed} case {case}: {name} of {shape}"
        assert all(map(torch.equal, into, expected)), where
        assert [tensor.stride() for tensor in into] == strides and all(map(torch.equal, given, kept)), where


@only_on_cpu("a list on a GPU has one order")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("hosts", [(0, 0), (0, 1), (0, 0, 0)], ids=str)
def test_lists_of_several_memory_orders_arrive_as_their_values(hosts):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    run_ranks(_run, len(hosts), "farandole", enter=PretendHost(hosts), timeout=60, seed=seed)
