"""Feature processors of tables by row, which torchrec lets write positions into the weights of what they are given."""

from __future__ import annotations

import itertools
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

KEYS = ["g0", "g1"]


def given(how: str, features: Any) -> Any:
    """What the processors get of features that others have as well."""
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    if how == "permuted":
        return features.permute([1, 0])
    if how == "remapped":
        return KeyedJaggedTensor(KEYS, features.values() % 30, features.weights_or_none(), lengths=features.lengths())
    return features


def made(seed: int, how: str, is_first: bool, is_weighted: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    import torchrec_models as models
    from torchrec_models import ROWS, WIDTH, EmbeddingBagCollection, EmbeddingBagConfig

    def tables(name: str, is_weighted: bool) -> Any:
        configs = [EmbeddingBagConfig(ROWS, WIDTH, name=f"{name}{i}", feature_names=[KEYS[i]]) for i in range(2)]
        return EmbeddingBagCollection(configs, is_weighted=is_weighted)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.plain = tables("t", is_weighted)
            processors = models.PositionWeightedModuleCollection({key: models.LONGEST + 1 for key in KEYS})
            self.processed = models.FeatureProcessedEmbeddingBagCollection(tables("s", True), processors)
            self.top = nn.Linear(4 * WIDTH, 1)

        def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            calls = [lambda: self.processed(given(how, batch.second)), lambda: self.plain(batch.second)]
            found = [call().values() for call in (calls if is_first else calls[::-1])]
            scores = self.top(torch.cat(found, 1)).squeeze(1)
            losses = nn.functional.binary_cross_entropy_with_logits(scores, batch.labels, reduction="none")
            return losses, scores.detach()

    model, world = Model(), dist.get_world_size()
    sharder, processing = models.EmbeddingBagCollectionSharder(), models.FeatureProcessedEmbeddingBagCollectionSharder()
    sizes = {"local_size": world, "world_size": world, "device_type": "cpu"}
    whole = {f"t{i}": models.table_wise(rank=i % world, compute_kernel="fused") for i in range(2)}
    rows = {f"s{i}": models.row_wise(compute_kernel="fused") for i in range(2)}
    plan = {
        "plain": models.construct_module_sharding_plan(model.plain, whole, sharder=sharder, **sizes),
        "processed": models.construct_module_sharding_plan(model.processed, rows, sharder=processing, **sizes),
    }
    embeddings = [part for name, part in model.named_parameters() if "embedding" in name]
    models.apply_optimizer_in_backward(torch.optim.SGD, embeddings, {"lr": 0.2})
    env = models.ShardingEnv(world, dist.get_rank(), dist.group.WORLD)
    shards = models.DistributedModelParallel(
        model, env, models.CPU, models.ShardingPlan(plan), sharders=[sharder, processing]
    )
    return shards, torch.optim.Adam([part for name, part in shards.named_parameters() if "embedding" not in name], 0.02)


def share_features(rank: int, world_size: int, is_first: bool, seed: int) -> None:
    import torchrec_models as models

    for how, is_weighted in itertools.product(["shared", "permuted", "remapped"], [False, True]):
        kind = models.Kind((), (), "weighted" if is_weighted else "plain", False, False, seed)
        (model, optimizer), (plain, plain_optimizer) = (made(seed, how, is_first, is_weighted) for _ in range(2))
        plain.load_state_dict(model.state_dict())
        pipeline = TrainPipelineSparseDist(model, optimizer, models.CPU, strict=True)
        outputs = drain(pipeline, iter(models.make_batches(kind, seed, 4)))
        expected = plain_loop(plain, plain_optimizer, models.make_batches(kind, seed, 4))
        assert len(outputs) == 4 and all(map(torch.equal, outputs, expected)), (how, is_weighted)
        theirs = models.weights(plain)
        for name, value in models.weights(model).items():
            assert torch.equal(value, theirs[name]), name
        pipeline.detach()


@pytest.mark.parametrize("is_first", [False, True])
def test_processors_change_features_for_those_behind_them_alone(is_first):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    run_ranks(share_features, 2, "farandole", timeout=120, is_first=is_first, seed=seed)
