"""Random recommenders of torchrec, sharded every way that CPU has, and their batches."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
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
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
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
    has_processors: bool  # trained feature processors before the second collection
    has_mean: bool
    seed: int


WAYS = ("table", "row", "column", "data")


def random_kind(pick: random.Random) -> Kind:
    ways = tuple(pick.choice(WAYS) for _ in range(pick.randint(1, 4)))
    return Kind(ways, pick.random() < 0.5, pick.random() < 0.5, pick.randrange(1 << 20))


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
        self.second: Any = EmbeddingBagCollection(seconds, is_weighted=kind.has_processors)
        if kind.has_processors:
            processors = PositionWeightedModuleCollection({f"g{i}": LONGEST + 1 for i in range(2)})
            self.second = FeatureProcessedEmbeddingBagCollection(self.second, processors)
        self.bottom = nn.Linear(DENSE, WIDTH)
        self.top = nn.Sequential(nn.Linear(WIDTH * (len(kind.tables) + 3), 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [self.bottom(batch.dense), self.first(batch.first).values(), self.second(batch.second).values()]
        scores = self.top(torch.cat(parts, 1)).squeeze(1)
        losses = nn.functional.binary_cross_entropy_with_logits(scores, batch.labels, reduction="none")
        return losses, scores.detach()


def made(kind: Kind) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Sharded; tables by an optimizer that is fused into the backward, the rest by the one that is returned."""
    model = Recommender(kind)
    world = dist.get_world_size()
    specs = {
        f"t{i}": {
            "table": table_wise(rank=i % world),
            "row": row_wise(),
            "column": column_wise(ranks=[0, world - 1]),
            "data": data_parallel(),
        }[way]
        for i, way in enumerate(kind.tables)
    }
    rest = {f"s{i}": table_wise(rank=(i + 1) % world) for i in range(2)}
    sharder = EmbeddingBagCollectionSharder()
    second: Any = FeatureProcessedEmbeddingBagCollectionSharder() if kind.has_processors else sharder
    sizes = {"local_size": world, "world_size": world, "device_type": "cpu"}
    plan = {
        "first": construct_module_sharding_plan(model.first, specs, sharder=sharder, **sizes),
        "second": construct_module_sharding_plan(model.second, rest, sharder=second, **sizes),
    }
    tables = [p for name, p in model.named_parameters() if "embedding_bags" in name]
    apply_optimizer_in_backward(torch.optim.SGD, tables, {"lr": 0.2})
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = DistributedModelParallel(model, env, CPU, ShardingPlan(plan), sharders=[sharder, second])
    dense = [p for name, p in sharded.named_parameters() if "embedding_bags" not in name]
    return sharded, torch.optim.Adam(dense, lr=0.02)


def make_batches(kind: Kind, seed: int, number: int, is_even: bool = False) -> list[Batch]:
    """Different ones on each rank, with as many samples where it ``is_even``."""
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    sizes = torch.Generator().manual_seed(seed) if is_even else generator

    def features(name: str, count: int, size: int) -> KeyedJaggedTensor:
        lengths = torch.randint(0, LONGEST + 1, (count * size,), generator=generator)
        values = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
        return KeyedJaggedTensor([f"{name}{i}" for i in range(count)], values, lengths=lengths)

    batches = []
    for _ in range(number):
        size = int(torch.randint(2, 9, (), generator=sizes))
        dense = torch.randn(size, DENSE, generator=generator)
        labels = torch.randint(0, 2, (size,), generator=generator).float()
        batches.append(Batch(dense, features("f", len(kind.tables), size), features("g", 2, size), labels))
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
