"""The model over the ranks of a group: tables sharded by torchrec, the rest replicated."""

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.distributed import DistributedModelParallel, ModuleSharder, ShardingEnv
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from recsys_model.model import Dlrm

ROW_WISE = 1000  # tables with more rows are split by rows, smaller ones are on one rank each


def shard(model: Dlrm, group: dist.ProcessGroup, rate: float, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """The model is used up. Tables are updated in the backward (Adagrad), the rest by the optimizer (Adam).

    Each rank fills its shards with random numbers, by the seed.
    """
    ranks = group.size()
    apply_optimizer_in_backward(torch.optim.Adagrad, model.tables.parameters(), {"lr": 3 * rate})
    sharder = EmbeddingBagCollectionSharder()
    sharders: list[ModuleSharder[nn.Module]] = [sharder]
    plan = ShardingPlan({"tables": _plan(model.tables, ranks, sharder)})
    environment = ShardingEnv.from_process_group(group)
    with torch.random.fork_rng():
        torch.manual_seed(seed * ranks + group.rank())
        parallel = DistributedModelParallel(model, environment, torch.device("cpu"), plan, sharders)
    replicated = dict(in_backward_optimizer_filter(parallel.named_parameters()))
    dense = KeyedOptimizerWrapper(replicated, lambda weights: torch.optim.Adam(weights, lr=rate))
    return parallel, CombinedOptimizer([parallel.fused_optimizer, dense])


def _plan(tables: EmbeddingBagCollection, ranks: int, sharder: ModuleSharder) -> EmbeddingModuleShardingPlan:
    configs = tables.embedding_bag_configs()
    kinds = {
        config.name: row_wise() if config.num_embeddings > ROW_WISE else table_wise(rank=place % ranks)
        for place, config in enumerate(configs)
    }
    return construct_module_sharding_plan(tables, kinds, sharder, ranks, ranks, "cpu")
