"""Random recommenders of torchrec, sharded every way that CPU has, and their batches."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

ROWS, WIDTH, DENSE, LONGEST = 60, 8, 4, 4
CPU = torch.device("cpu")


@dataclass
class Batch:
    dense: torch.Tensor
    first: KeyedJaggedTensor
    second: KeyedJaggedTensor
    third: KeyedJaggedTensor
    labels: torch.Tensor


class Movable(Batch, Pipelineable):
    """As torchrec's own pipeline wants it."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Movable:
        return self

    def record_stream(self, stream: torch.Stream) -> None:
        pass


@dataclass(frozen=True)
class Kind:
    """What a model is made of."""

    tables: tuple[str, ...]  # ways of sharding, of the first collection
    sequences: tuple[str, ...]  # of the third, which does not pool
    second: str  # "plain", "weighted" (by the batch) or "processors": trained ones before it
    has_mean: bool
    has_vbe: bool  # features of the first collection have batch sizes of their own
    seed: int


WAYS = ("table", "row", "column", "data")
# What fbgemm's dense kernel, which those of "data" have, cannot do on CPU: features with batch sizes of their own, and
# no pooling.
FUSED_WAYS = ("table", "row", "column")


def random_kind(pick: random.Random) -> Kind:
    has_vbe = pick.random() < 0.3
    ways = tuple(pick.choice(FUSED_WAYS if has_vbe else WAYS) for _ in range(pick.randint(1, 4)))
    sequences = tuple(pick.choice(FUSED_WAYS) for _ in range(pick.randint(0, 3)))
    second = pick.choice(("plain", "weighted", "processors"))
    # torchrec 1.6.1 looks for the lengths that it divides by where other features have theirs, in a plain loop as well.
    has_mean = not has_vbe and pick.random() < 0.5
    return Kind(ways, sequences, second, has_mean, has_vbe, pick.randrange(1 << 20))


class Recommender(nn.Module):
    def __init__(self, kind: Kind) -> None:
        super().__init__()
        torch.manual_seed(kind.seed)
        pooling = PoolingType.MEAN if kind.has_mean else PoolingType.SUM
        self.first = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(ROWS, WIDTH, name=f"t{i}", feature_names=[f"f{i}"], pooling=pooling)
                for i in range(len(kind.tables))
            ]
        )
        seconds = [EmbeddingBagConfig(ROWS, WIDTH, name=f"s{i}", feature_names=[f"g{i}"]) for i in range(2)]
        self.second: Any = EmbeddingBagCollection(seconds, is_weighted=kind.second != "plain")
        if kind.second == "processors":
            processors = PositionWeightedModuleCollection({f"g{i}": LONGEST + 1 for i in range(2)})
            self.second = FeatureProcessedEmbeddingBagCollection(self.second, processors)
        self.sequences = tuple(f"h{i}" for i in range(len(kind.sequences)))
        if self.sequences:
            self.third = EmbeddingCollection(
                [EmbeddingConfig(ROWS, WIDTH, name=f"u{i}", feature_names=[h]) for i, h in enumerate(self.sequences)]
            )
        self.bottom = nn.Linear(DENSE, WIDTH)
        width = WIDTH * (len(kind.tables) + len(kind.sequences) + 3)
        self.top = nn.Sequential(nn.Linear(width, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [self.bottom(batch.dense), self.first(batch.first).values(), self.second(batch.second).values()]
        if self.sequences:
            found = self.third(batch.third)
            parts += [found[name].to_padded_dense(LONGEST).cos().sum(1) for name in self.sequences]
        scores = self.top(torch.cat(parts, 1)).squeeze(1)
        losses = nn.functional.binary_cross_entropy_with_logits(scores, batch.labels, reduction="none")
        return losses, scores.detach()


def made(kind: Kind, has_dtensors: bool = False) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sharded; tables by an optimizer that is fused into the backward, the rest by the one that is returned. Tables are
    ShardedTensors in its state, or DTensors."""
    model = Recommender(kind)
    world = dist.get_world_size()

    def specs(name: str, ways: tuple[str, ...]) -> dict[str, Any]:
        return {
            f"{name}{i}": {
                "table": table_wise(rank=i % world, compute_kernel="fused"),
                "row": row_wise(compute_kernel="fused"),
                "column": column_wise(ranks=[0, world - 1], compute_kernel="fused"),
                "data": data_parallel(),
            }[way]
            for i, way in enumerate(ways)
        }

    rest = {f"s{i}": table_wise(rank=(i + 1) % world) for i in range(2)}
    sharder = EmbeddingBagCollectionSharder()
    second: Any = FeatureProcessedEmbeddingBagCollectionSharder() if kind.second == "processors" else sharder
    third = EmbeddingCollectionSharder()
    sizes = {"local_size": world, "world_size": world, "device_type": "cpu"}
    plan = {
        "first": construct_module_sharding_plan(model.first, specs("t", kind.tables), sharder=sharder, **sizes),
        "second": construct_module_sharding_plan(model.second, rest, sharder=second, **sizes),
    }
    if kind.sequences:
        ways = specs("u", kind.sequences)
        plan["third"] = construct_module_sharding_plan(model.third, ways, sharder=third, **sizes)
    tables = [p for name, p in model.named_parameters() if "embedding" in name]
    apply_optimizer_in_backward(torch.optim.SGD, tables, {"lr": 0.2})
    env = ShardingEnv(world, dist.get_rank(), dist.group.WORLD, has_dtensors)
    sharded = DistributedModelParallel(model, env, CPU, ShardingPlan(plan), sharders=[sharder, second, third])
    dense = [p for name, p in sharded.named_parameters() if "embedding" not in name]
    return sharded, torch.optim.Adam(dense, lr=0.02)


def make_batches(kind: Kind, seed: int, number: int, is_even: bool = False) -> list[Batch]:
    """Different ones on each rank, with as many samples where it ``is_even``."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    sizes = torch.Generator().manual_seed(seed) if is_even else generator

    def features(name: str, count: int, size: int, is_weighted: bool = False, has_vbe: bool = False) -> Any:
        keys = [f"{name}{i}" for i in range(count)]
        given = [int(torch.randint(1, size + 1, (), generator=sizes)) if has_vbe else size for _ in keys]
        lengths = torch.randint(0, LONGEST + 1, (sum(given),), generator=generator)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        weights = torch.rand(len(values), generator=generator) if is_weighted else None
        if not has_vbe:
            if torch.rand((), generator=sizes) < 0.3:  # as some loaders have them
                offsets = nn.functional.pad(lengths.cumsum(0), (1, 0))
                return KeyedJaggedTensor(keys, values, weights, offsets=offsets)
            return KeyedJaggedTensor(keys, values, weights, lengths=lengths)
        inverse = torch.stack([torch.randint(0, each, (size,), generator=generator) for each in given])
        return KeyedJaggedTensor(
            keys,
            values,
            weights,
            lengths=lengths,
            stride_per_key_per_rank=[[each] for each in given],
            inverse_indices=(keys, inverse),
        )

    batches = []
    for _ in range(number):
        size = int(torch.randint(2, 9, (), generator=sizes))
        dense = torch.randn(size, DENSE, generator=generator)
        labels = torch.randint(0, 2, (size,), generator=generator).float()
        first = features("f", len(kind.tables), size, has_vbe=kind.has_vbe)
        second = features("g", 2, size, is_weighted=kind.second == "weighted")
        batches.append(Batch(dense, first, second, features("h", len(kind.sequences), size), labels))
    return batches


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """What this rank has of each parameter."""
    found = {}
    for name, value in model.state_dict().items():
        parts = value.local_shards() if hasattr(value, "local_shards") else None
        if parts is None:
            found[name] = value.to_local() if hasattr(value, "to_local") else value
        for index, part in enumerate(parts or []):
            found[f"{name}.{index}"] = part.tensor
    return {name: value.local_shards()[0] if hasattr(value, "local_shards") else value for name, value in found.items()}
