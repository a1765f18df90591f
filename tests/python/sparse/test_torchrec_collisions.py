"""torchrec's managed collisions: ids are remapped in the forward, in its order, whatever is ahead."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.sparse import TrainPipelineSparseDist
from sparse.torchrec_needed import needs_torchrec
from support.processes import run_ranks
from support.recommenders import drain, plain_loop

pytestmark = needs_torchrec

ROWS, WIDTH = 16, 8


def remapping(tables: int, seed: int, pooled: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Tables of few rows for many ids, which come and go every two batches."""
    import torchrec_models as models
    from torchrec.distributed.mc_embedding import ManagedCollisionEmbeddingCollectionSharder
    from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
    from torchrec.modules.mc_embedding_modules import (
        ManagedCollisionEmbeddingBagCollection,
        ManagedCollisionEmbeddingCollection,
    )
    from torchrec.modules.mc_modules import (
        DistanceLFU_EvictionPolicy,
        ManagedCollisionCollection,
        MCHManagedCollisionModule,
    )
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    class Remapping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            kind: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
            configs = [kind(ROWS, WIDTH, name=f"t{i}", feature_names=[f"f{i}"]) for i in range(tables)]
            collisions = {
                config.name: MCHManagedCollisionModule(
                    zch_size=ROWS,
                    device=models.CPU,
                    input_hash_size=1000,
                    eviction_interval=2,
                    eviction_policy=DistanceLFU_EvictionPolicy(),
                )
                for config in configs
            }
            remapped = ManagedCollisionCollection(collisions, configs)
            self.tables: Any = (
                ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(configs), remapped)
                if pooled
                else ManagedCollisionEmbeddingCollection(EmbeddingCollection(configs), remapped)
            )
            self.top = nn.Linear(WIDTH * tables, 1)

        def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            found = self.tables(batch.first)[0]
            if pooled:
                rows = found.values()
            else:
                rows = torch.cat([found[f"f{i}"].to_padded_dense(4).sum(1) for i in range(tables)], 1)
            scores = self.top(rows).squeeze(1)
            return (scores - batch.labels).square(), scores.detach()

    model = Remapping()
    sharder: Any = (
        ManagedCollisionEmbeddingBagCollectionSharder() if pooled else ManagedCollisionEmbeddingCollectionSharder()
    )
    world = dist.get_world_size()
    plan = construct_module_sharding_plan(
        model.tables,
        {f"t{i}": row_wise(compute_kernel="fused") for i in range(tables)},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    rows = [p for name, p in model.named_parameters() if "embedding" in name]
    apply_optimizer_in_backward(torch.optim.SGD, rows, {"lr": 0.2})
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    sharded = DistributedModelParallel(model, env, models.CPU, ShardingPlan({"tables": plan}), sharders=[sharder])
    return sharded, torch.optim.Adam([p for n, p in sharded.named_parameters() if n.startswith("top")], lr=0.02)


def train(rank: int, world_size: int, seed: int, pooled: bool, threads: bool | None) -> None:
    import torchrec_models as models

    pick = random.Random(seed)
    tables = pick.randint(1, 3)
    print(f"seed {seed}: {tables} tables, threads {threads}")
    made, plain = remapping(tables, seed, pooled), remapping(tables, seed, pooled)
    plain[0].load_state_dict(made[0].state_dict())
    kind = models.Kind(("table",) * tables, (), "plain", False, False, seed)
    batches, again = (models.make_batches(kind, seed, 9, is_even=True) for _ in range(2))
    pipeline = TrainPipelineSparseDist(*made, models.CPU, load_on_thread=threads, dist_on_thread=threads, strict=True)
    assert pipeline.explain() == "tables: pipelined"
    torch.manual_seed(seed)  # rows of ids that come are drawn anew
    outputs = drain(pipeline, iter(batches))
    torch.manual_seed(seed)
    expected = plain_loop(*plain, again)
    assert len(outputs) == 9 and all(map(torch.equal, outputs, expected))
    theirs = models.weights(plain[0])
    for name, value in models.weights(made[0]).items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.sample(3)
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize("threads", [False, True])
def test_managed_collisions_train_as_in_the_plain_loop(world_size, pooled, threads):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    run_ranks(train, world_size, "farandole", timeout=120, seed=seed, pooled=pooled, threads=threads)
