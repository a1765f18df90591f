"""What the tests of farandole.megatron's data parallelism share: random models, groups that both sides take, both sides."""

from __future__ import annotations

import copy
import random
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from farandole import megatron
from support.megatrons import import_distributed

DTYPES = [torch.float32, torch.bfloat16, torch.float64]


def collection_of(dp: Any, experts: Any, pp_rank: int = 0) -> Any:
    """Groups by Megatron-core's names; of those that nothing is exchanged over, size and rank."""
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    pp = SimpleNamespace(size=lambda: pp_rank + 1, rank=lambda: pp_rank)
    return SimpleNamespace(dp=dp, dp_cp=dp, expt_dp=experts, tp=alone, ep=alone, pp=pp)


def alone_groups(rank: int, world_size: int) -> Any:
    """A group of this rank only. Collective."""
    return [dist.new_group([other]) for other in range(world_size)][rank]


class Weights(nn.Module):
    """Parameters of random sizes and types, some of experts, some a shared embedding, some frozen."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.all = nn.ParameterList()
        dtypes = rng.sample(DTYPES, rng.randint(1, 3))
        for _ in range(rng.randint(1, 12)):
            shape = [rng.choice([1, 2, 5, 63, 64, 65]) for _ in range(rng.randint(1, 2))]
            weight = nn.Parameter(torch.ones(shape, dtype=rng.choice(dtypes)))
            weight.allreduce = rng.random() < 0.8  # type: ignore[attr-defined]
            if rng.random() < 0.15:
                weight.shared_embedding = True  # type: ignore[attr-defined]
            if rng.random() < 0.1:
                weight.requires_grad_(False)
            self.all.append(weight)
        self.all[0].requires_grad_(True)


class Network(nn.Module):
    """Layers of random widths; some are experts."""

    def __init__(self, rng: random.Random, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(rng.randrange(2**31))
        widths = [4] + [rng.choice([1, 3, 16, 40]) for _ in range(rng.randint(1, 4))]
        self.layers = nn.ModuleList(nn.Linear(a, b, dtype=dtype) for a, b in zip(widths, widths[1:]))
        for layer in self.layers[1:]:
            if rng.random() < 0.3:
                layer.weight.allreduce = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().sum()


def both(module: Any, options: dict[str, Any], collection: Any, per_token: bool = False, **more: Any) -> list[Any]:
    """Megatron-core's wrapper and ours, around copies of the module."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    theirs = import_distributed()
    config = TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=1, calculate_per_token_loss=per_token)
    wrapped = []
    for api in (theirs, megatron):
        # Megatron-core writes into its config.
        ddp_config = api.DistributedDataParallelConfig(**options)
        ours = copy_of(module)
        wrapped.append(api.DistributedDataParallel(config, ddp_config, ours, pg_collection=collection, **more))
    return wrapped


def copy_of(module: Any) -> Any:
    copied = copy.deepcopy(module)
    for mine, other in zip(copied.parameters(), module.parameters()):
        mine.__dict__.update(other.__dict__)
    return copied


def parts(theirs: Any, ours: Any, sharded: bool) -> Any:
    """Pairs of what a rank has of the gradients: all, or its part of each bucket."""
    if not sharded:
        yield from ((a.main_grad, b.main_grad) for a, b in zip(theirs.params_with_grad, ours.params_with_grad))
        return
    position = {parameter: i for i, parameter in enumerate(theirs.params_with_grad)}
    our_buckets = {slot[0]: bucket for bucket in ours._reducer.buckets() for slot in bucket.slots}
    for groups, data in ((theirs.bucket_groups, ours.replicas), (theirs.expert_parallel_bucket_groups, ours.experts)):
        size, rank = data.group.size(), data.group.rank()
        for group in groups:
            for bucket in group.buckets:
                mine = our_buckets[position[bucket.params_list[0]]]
                yield bucket.grad_data.chunk(size)[rank], mine.grads.chunk(size)[rank]
