"""A small DLRM, sharded by table and by row, and its batches. Imports torchrec."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

_TABLES, _ROWS, _WIDTH, _DENSE, _LONGEST = 8, 10_000, 32, 13, 4


@dataclass
class Batch(Pipelineable):
    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        parts = (self.dense, self.sparse, self.labels)
        return Batch(*(part.to(device, non_blocking=non_blocking) for part in parts))

    def record_stream(self, stream: torch.Stream) -> None:
        for part in (self.dense, self.sparse, self.labels):
            part.record_stream(stream)


class Hash(nn.Module):
    """Of ids to rows, ahead of the tables."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(features.keys(), features.values() % _ROWS, lengths=features.lengths())


class Dlrm(nn.Module):
    def __init__(self, ahead: int) -> None:
        super().__init__()
        self.ahead = nn.ModuleList(Hash() for _ in range(ahead))
        self.tables = EmbeddingBagCollection(
            [EmbeddingBagConfig(_ROWS, _WIDTH, name=f"t{i}", feature_names=[f"f{i}"]) for i in range(_TABLES)]
        )
        self.bottom = nn.Sequential(nn.Linear(_DENSE, 64), nn.ReLU(), nn.Linear(64, _WIDTH))
        self.top = nn.Sequential(nn.Linear(_WIDTH * (_TABLES + 1), 128), nn.ReLU(), nn.Linear(128, 1))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        ids = batch.sparse
        for module in self.ahead:
            ids = module(ids)
        lookups = self.tables(ids).values()
        features = torch.cat([self.bottom(batch.dense), lookups], 1)
        scores = self.top(features).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, batch.labels)
        return loss.reshape(1), scores.detach()


def sharded(group: dist.ProcessGroup, ahead: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """
    Args:
        ahead: how many modules without parameters there are between the batch and the tables.
    """
    torch.manual_seed(0)
    model = Dlrm(ahead)
    world = group.size()
    ways = {f"t{i}": table_wise(rank=i // 2 % world) if i % 2 else row_wise() for i in range(_TABLES)}
    sharder = EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        model.tables, ways, local_size=world, world_size=world, device_type="cpu", sharder=sharder
    )
    apply_optimizer_in_backward(torch.optim.SGD, model.tables.parameters(), {"lr": 0.1})
    env = ShardingEnv.from_process_group(group)
    model = DistributedModelParallel(
        model, env, torch.device("cpu"), ShardingPlan({"tables": plan}), sharders=[sharder]
    )
    dense = [parameter for name, parameter in model.named_parameters() if "tables" not in name]
    return model, torch.optim.SGD(dense, lr=0.1)


def make_batches(rank: int, samples: int, number: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(rank)
    batches = []
    for _ in range(number):
        lengths = torch.randint(0, _LONGEST, (_TABLES * samples,), generator=generator)
        values = torch.randint(0, _ROWS, (int(lengths.sum()),), generator=generator)
        features = KeyedJaggedTensor([f"f{i}" for i in range(_TABLES)], values, lengths=lengths)
        dense = torch.randn(samples, _DENSE, generator=generator)
        batches.append(Batch(dense, features, torch.randint(0, 2, (samples,), generator=generator).float()))
    return batches
