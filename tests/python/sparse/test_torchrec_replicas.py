"""torchrec's 2D sharding: each group of ranks has all tables, and the groups average theirs every so many batches."""

from __future__ import annotations

import random
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from farandole.sparse import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from sparse.torchrec_needed import needs_torchrec
from support.processes import run_ranks
from support.recommenders import drain, plain_loop

pytestmark = needs_torchrec

WAYS = ("table", "row", "table")
IN_A_GROUP = 2


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        import torchrec_models as models
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection

        super().__init__()
        torch.manual_seed(seed)
        configs = [
            EmbeddingBagConfig(models.ROWS, models.WIDTH, name=f"t{i}", feature_names=[f"f{i}"])
            for i in range(len(WAYS))
        ]
        self.tables = EmbeddingBagCollection(configs)
        self.top = nn.Linear(models.WIDTH * len(WAYS), 1)

    def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.top(self.tables(batch.first).values()).squeeze(1)
        return (scores - batch.labels).square(), scores.detach()


class Task(nn.Module):
    """A model around another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, batch: Any) -> Any:
        return self.inner(batch)


def replicated(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """Over groups of two ranks. What torchrec asks for CUDA does nothing of it."""
    import torchrec_models as models
    from torch.distributed import _remote_device
    from torch.distributed.device_mesh import DeviceMesh
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
    from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

    class OnCpu(DistributedModelParallel):
        def __init__(self, module: Any, env: Any, device: Any, *args: Any) -> None:
            super().__init__(module, env, models.CPU, *args)

    class Collection(DMPCollection, OnCpu):
        def _create_process_groups(self, global_rank: int, world_size: int, local_size: int, **_: Any) -> Any:
            self._device = models.CPU
            step = world_size // local_size
            ranks = [[step * each + group for each in range(local_size)] for group in range(step)]
            mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
            return mesh, mesh.get_group("shard"), mesh.get_group("replicate")

        def _remap_sharding_plan(self, plan: ShardingPlan, rank: int, step: int, **_: Any) -> None:
            for specs in plan.plan["tables"].values():
                specs.ranks = [each * step + rank % step for each in specs.ranks]
                for shard in specs.sharding_spec.shards:
                    shard.placement = _remote_device(f"rank:{shard.placement.rank() * step + rank % step}/cpu")

    model = Net(seed)
    sharder = EmbeddingBagCollectionSharder()
    ways = {
        "table": lambda index: table_wise(rank=index % IN_A_GROUP, compute_kernel="fused"),
        "row": lambda index: row_wise(compute_kernel="fused"),
    }
    plan = construct_module_sharding_plan(
        model.tables,
        {f"t{i}": ways[way](i) for i, way in enumerate(WAYS)},
        sharder=sharder,
        local_size=IN_A_GROUP,
        world_size=IN_A_GROUP,
        device_type="cpu",
    )
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": 0.2})
    sharded = Collection(
        model,
        torch.device("cuda"),
        ShardingPlan({"tables": plan}),
        world_size=dist.get_world_size(),
        sharding_group_size=IN_A_GROUP,
        global_pg=dist.group.WORLD,
        sharders=[sharder],
    )
    return sharded, torch.optim.Adam([p for name, p in sharded.named_parameters() if name.startswith("top")], lr=0.02)


def local_tables(model: Any) -> list[torch.Tensor]:
    return [rows for context in model._ctxs for group in context.weights_by_dtype.values() for rows in group]


def train(rank: int, world_size: int, seed: int) -> None:
    import torchrec_models as models

    pick = random.Random(seed)
    for kind, within in ((TrainPipelineSparseDist, Task), (PrefetchTrainPipelineSparseDist, lambda model: model)):
        for interval in (1, pick.randint(2, 3), None):
            numbers = [pick.randint(4, 8) for _ in range(world_size)]  # of batches, of which the fewest are computed
            print(f"seed {seed}: {kind.__name__}, every {interval} batches, {numbers} batches")
            (model, optimizer), (plain, plain_optimizer) = replicated(seed), replicated(seed)
            options: Any = {"dmp_collection_sync_interval_batches": interval, "strict": True}
            pipeline = kind(within(model), optimizer, models.CPU, **options)
            shape = models.Kind(WAYS, (), "plain", False, False, 0)
            outputs = drain(pipeline, iter(models.make_batches(shape, seed, numbers[rank])))
            expected = []
            for index, batch in enumerate(models.make_batches(shape, seed, min(numbers))):
                expected += plain_loop(plain, plain_optimizer, [batch])
                if interval is not None and index % interval == 0:
                    plain.sync()
            assert len(outputs) == min(numbers) and all(map(torch.equal, outputs, expected))
            assert all(map(torch.equal, local_tables(model), local_tables(plain)))
            assert all(map(torch.equal, model.module.top.parameters(), plain.module.top.parameters()))


def test_replicas_of_tables_are_averaged_as_often_as_asked():
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    run_ranks(train, 4, "farandole", timeout=120, seed=seed)
