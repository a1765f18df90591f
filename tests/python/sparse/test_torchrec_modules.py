"""torchrec's sharded modules that are not built as its collections are, and what it changes in one that is."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from farandole.sparse import EvalPipelineSparseDist, TrainPipelineSparseDist
from farandole.sparse._exchange import SplitsExchange
from sparse.torchrec_needed import needs_torchrec
from support.processes import run_ranks
from support.recommenders import drain, plain_loop

pytestmark = needs_torchrec

POOL, SIZE = 16, 5


@dataclass
class Batch:
    features: Any
    ids: torch.Tensor
    labels: torch.Tensor


def batches_of(seed: int, number: int) -> list[Batch]:
    """All of one size, as torchrec's towers need it."""
    import torchrec_models as models
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    batches = []
    for _ in range(number):
        lengths = torch.randint(0, 4, (4 * SIZE,), generator=generator)
        values = torch.randint(0, models.ROWS, (int(lengths.sum()),), generator=generator)
        ids = torch.randint(0, POOL, (SIZE,), generator=generator)
        features = KeyedJaggedTensor([f"f{i}" for i in range(4)], values, lengths=lengths)
        batches.append(Batch(features, ids, torch.rand(SIZE, generator=generator)))
    return batches


def bags(names: str, keys: str) -> Any:
    import torchrec_models as models
    from torchrec.modules.embedding_configs import EmbeddingBagConfig
    from torchrec.modules.embedding_modules import EmbeddingBagCollection

    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(models.ROWS, models.WIDTH, name=name, feature_names=[f"f{key}"])
            for name, key in zip(names, keys, strict=True)
        ]
    )


class Scored(nn.Module):
    def __init__(self, seed: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.top = nn.Linear(width, 1)

    def rows(self, batch: Batch) -> list[torch.Tensor]:
        raise NotImplementedError

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        scores = self.top(torch.cat(self.rows(batch), 1)).squeeze(1)
        return (scores - batch.labels).square(), scores.detach()


class Pooled(Scored):
    def __init__(self, seed: int, calls_lookup: bool) -> None:
        import torchrec_models as models
        from torchrec.modules.tensor_pool import TensorPool

        super().__init__(seed, 3 * models.WIDTH)
        self.calls_lookup = calls_lookup
        self.tables = bags("ab", "01")
        self.pool = TensorPool(POOL, models.WIDTH, torch.float32, device=models.CPU)

    def rows(self, batch: Batch) -> list[torch.Tensor]:
        found = self.pool.lookup(batch.ids) if self.calls_lookup else self.pool(batch.ids)
        return [self.tables(batch.features).values(), found.wait()]


class Towers(Scored):
    def __init__(self, seed: int) -> None:
        import torchrec_models as models
        from torchrec.modules.embedding_tower import EmbeddingTower

        super().__init__(seed, 4 * models.WIDTH)
        self.tables = bags("ab", "01")
        width = models.WIDTH
        self.tower = EmbeddingTower(bags("c", "2"), Interaction(width))
        self.other = EmbeddingTower(bags("d", "3"), Interaction(width))

    def rows(self, batch: Batch) -> list[torch.Tensor]:
        return [self.tables(batch.features).values(), self.tower(batch.features), self.other(batch.features)]


class Interaction(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, found: Any) -> torch.Tensor:
        return self.linear(found.values())


def sharded(model: nn.Module, more: dict[str, Any], sharders: list[Any]) -> tuple[Any, torch.optim.Optimizer]:
    import torchrec_models as models
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
    from torchrec.distributed.types import ShardingEnv, ShardingPlan
    from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

    sharder = EmbeddingBagCollectionSharder()
    world = dist.get_world_size()
    specs = {"a": table_wise(rank=world - 1, compute_kernel="fused"), "b": row_wise(compute_kernel="fused")}
    sizes = {"local_size": world, "world_size": world, "device_type": "cpu"}
    plan = construct_module_sharding_plan(model.tables, specs, sharder=sharder, **sizes)
    rows = [part for name, part in model.named_parameters() if "embedding_bags" in name]
    apply_optimizer_in_backward(torch.optim.SGD, rows, {"lr": 0.2})
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    whole = ShardingPlan({"tables": plan, **more})
    model = DistributedModelParallel(model, env, models.CPU, whole, sharders=[sharder, *sharders])
    dense = [part for name, part in model.named_parameters() if "embedding_bags" not in name]
    return model, torch.optim.Adam(dense, lr=0.02)


def pooled(seed: int, calls_lookup: bool) -> tuple[Any, torch.optim.Optimizer]:
    import torchrec_models as models
    from torchrec.distributed.tensor_pool import TensorPoolSharder
    from torchrec.distributed.types import ObjectPoolShardingPlan, ObjectPoolShardingType

    plan = {"pool": ObjectPoolShardingPlan(ObjectPoolShardingType.ROW_WISE)}
    model, optimizer = sharded(Pooled(seed, calls_lookup), plan, [TensorPoolSharder()])
    mine = torch.arange(dist.get_rank(), POOL, dist.get_world_size())
    pool = model.module.pool
    pool.update(mine, torch.randn(len(mine), models.WIDTH, generator=torch.Generator().manual_seed(seed)))
    return model, optimizer


def towers(seed: int) -> tuple[Any, torch.optim.Optimizer]:
    """Each on a host of its own, which is one rank here."""
    from torch.nn.parallel import DistributedDataParallel
    from torchrec.distributed import embedding_tower_sharding
    from torchrec.distributed.sharding_plan import table_row_wise
    from torchrec.distributed.types import EmbeddingModuleShardingPlan

    # torchrec names a CPU among the devices of this wrapper, which torch takes for none.
    embedding_tower_sharding.DistributedDataParallel = lambda module, device_ids, **options: DistributedDataParallel(
        module, **options
    )
    sharder = embedding_tower_sharding.EmbeddingTowerSharder()
    model = Towers(seed)
    plans = {}
    for host, (name, table) in enumerate([("tower", "c"), ("other", "d")]):
        parameters = sharder.shardable_parameters(model.get_submodule(name))
        specs = table_row_wise(host_index=host)(parameters[table], 1, dist.get_world_size(), "cpu", sharder)
        specs.compute_kernel = "fused"
        plans[name] = EmbeddingModuleShardingPlan({table: specs})
    return sharded(model, plans, [sharder])


def compare(make: Any, seed: int, expected: list[str], is_by_hooks: bool = False, **options: Any) -> None:
    (model, optimizer), (plain, plain_optimizer) = make(), make()
    pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"), **options)
    outputs = drain(pipeline, iter(batches_of(seed, 6)))
    told, *by_hooks = pipeline.explain().split("\nby hooks, since torch.fx cannot trace")
    assert told.splitlines() == expected and len(by_hooks) == is_by_hooks
    assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, batches_of(seed, 6))))
    assert len(outputs) == 6
    theirs = dict(plain.named_parameters())
    assert all(torch.equal(part, theirs[name]) for name, part in model.named_parameters())
    pipeline.detach()


NOT = "pool: not pipelined: one of torchrec's object pools looks up in one piece. It stays in the forward, and strict="


@pytest.mark.filterwarnings("ignore:sharded modules exchange", "ignore:inputs of sharded modules are found by hooks")
def with_pool(rank: int, world_size: int, seed: int) -> None:
    for calls_lookup in (False, True):
        expected = ["tables: pipelined", f"{NOT}True refuses it."]
        compare(lambda calls_lookup=calls_lookup: pooled(seed, calls_lookup), seed, expected, is_by_hooks=calls_lookup)
    with pytest.raises(ValueError, match=f"^sharded modules cannot be pipelined\n{NOT}"):
        TrainPipelineSparseDist(*pooled(seed, False), torch.device("cpu"), strict=True).explain()


def test_object_pools_look_up_in_the_forward():
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    run_ranks(with_pool, 2, "farandole", timeout=120, seed=seed)


def with_towers(rank: int, world_size: int, seed: int) -> None:
    for threads in (False, True):
        expected = [f"{name}: pipelined" for name in ("tables", "tower", "other")]
        options = {"load_on_thread": threads, "dist_on_thread": threads, "strict": True}
        compare(lambda: towers(seed), seed, expected, **options)


def test_towers_are_exchanged_alike_on_ranks_that_have_them_and_others():
    # Only the rank of a tower has its tables, and what these would exchange their inputs with.
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    run_ranks(with_towers, 2, "farandole", timeout=120, env={"LOCAL_WORLD_SIZE": "1"}, seed=seed)


def without_meetings(rank: int, world_size: int) -> None:
    import torchrec_models as models

    kind = models.Kind(("data", "data"), (), "plain", False, False, 3)
    (model, optimizer), (plain, plain_optimizer) = models.made(kind), models.made(kind)
    pipeline = TrainPipelineSparseDist(model, optimizer, models.CPU, strict=True)
    batches = iter(models.make_batches(kind, 1, 6))
    outputs = [pipeline.progress(batches)]
    meetings: list[Any] = []
    original = SplitsExchange.agree
    SplitsExchange.agree = lambda self, *args: meetings.append(args) or original(self, *args)
    outputs += drain(pipeline, batches)
    assert not meetings and len(outputs) == 6
    assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, models.make_batches(kind, 1, 6))))


def test_data_parallel_collections_cost_no_meeting_of_the_ranks():
    run_ranks(without_meetings, 2, "farandole", timeout=60)


def reshard(rank: int, world_size: int, seed: int) -> None:
    import torchrec_models as models
    from torchrec.distributed.types import (
        EmbeddingModuleShardingPlan,
        EnumerableShardingSpec,
        ParameterSharding,
        ShardMetadata,
    )

    kind = models.Kind(("table", "table"), (), "plain", False, False, seed)

    def change(model: Any) -> None:
        """The first table goes to the other rank."""
        shard = ShardMetadata(shard_sizes=[models.ROWS, models.WIDTH], shard_offsets=[0, 0], placement="rank:1/cpu")
        specs = ParameterSharding("table_wise", "fused", ranks=[1], sharding_spec=EnumerableShardingSpec([shard]))
        model.reshard({"first": (0.0, EmbeddingModuleShardingPlan({"t0": specs}))}, "first")

    (model, optimizer), (plain, plain_optimizer) = models.made(kind), models.made(kind)
    plain.load_state_dict(model.state_dict())
    pipeline = TrainPipelineSparseDist(model, optimizer, models.CPU, strict=True)
    batches, again = iter(models.make_batches(kind, seed, 6)), models.make_batches(kind, seed, 6)
    outputs = [pipeline.progress(batches) for _ in range(2)]
    pipeline.detach()
    change(model)
    pipeline.attach()
    outputs += [pipeline.progress(batches) for _ in range(2)]
    expected = plain_loop(plain, plain_optimizer, again[:2])
    change(plain)
    expected += plain_loop(plain, plain_optimizer, again[2:4])
    assert all(map(torch.equal, outputs, expected))
    change(model)
    with pytest.raises(RuntimeError, match=r"^first has changed under its pipeline: expected the sharding that was"):
        pipeline.progress(batches)


def test_tables_are_resharded_between_detach_and_attach():
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    run_ranks(reshard, 2, "farandole", timeout=60, seed=seed)


def share_tables(rank: int, world_size: int) -> None:
    """Two models around the same sharded modules, each with a pipeline."""
    import torchrec_models as models

    kind = models.Kind(("table", "row"), (), "plain", False, False, 3)
    (model, optimizer), (plain, plain_optimizer) = models.made(kind), models.made(kind)
    batches = models.make_batches(kind, 1, 6)
    iterator = iter(batches)
    training = TrainPipelineSparseDist(model, optimizer, "cpu")
    outputs = [training.progress(iterator)]
    around = torch.nn.Sequential(model.module)
    evaluation = EvalPipelineSparseDist(around, optimizer, "cpu")
    evaluation.progress(iter(models.make_batches(kind, 2, 3)))
    with pytest.raises(
        RuntimeError, match=r"has changed under its pipeline: .*no pipeline of another model that has it"
    ):
        training.progress(iterator)
    evaluation.detach()
    training.detach()
    outputs += drain(training, iterator)
    assert all(map(torch.equal, outputs, plain_loop(plain, plain_optimizer, batches)))


def test_pipelines_of_models_that_share_tables_take_turns_by_detach():
    run_ranks(share_tables, 2, "farandole")
