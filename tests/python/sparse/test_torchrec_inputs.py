"""Models of torchrec: KeyedJaggedTensors that come from the batch in all the usual ways."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from farandole.sparse import _sharded
from farandole.sparse._batches import record_stream
from farandole.sparse._input_equality import is_alike, is_equal_input
from farandole.sparse._input_graph import trace_inputs
from farandole.sparse._input_hooks import record_inputs
from support.streams import Device

pytest.importorskip("torchrec", reason="torchrec is not installed")

from torchrec.datasets.utils import Batch
from torchrec.distributed.types import ShardedModule
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

KEYS = ["x", "y", "z"]
SIZE = 3


def random_kjt(seed: int) -> KeyedJaggedTensor:
    rng = random.Random(seed)
    lengths = torch.tensor([rng.randint(0, 4) for _ in range(SIZE * len(KEYS))])
    values = torch.tensor([rng.randrange(20) for _ in range(int(lengths.sum()))])
    return KeyedJaggedTensor(KEYS, values=values, lengths=lengths, weights=torch.rand(len(values)))


def random_batch(seed: int) -> Batch:
    torch.manual_seed(seed)
    return Batch(torch.randn(SIZE, 4), random_kjt(seed), torch.randint(2, (SIZE,)))


class Scaled(nn.Module):
    """Post-processing of a KeyedJaggedTensor, with state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        self.seen += 1
        if features.values().numel() == 0:  # what torch.fx cannot trace
            return features
        values = features.values() % 5 + self.seen
        return KeyedJaggedTensor(features.keys(), values, features.weights_or_none(), lengths=features.lengths())


class Model(nn.Module):
    def __init__(self, forward: Callable[[Any, Batch], Any]) -> None:
        super().__init__()
        self.bags, self.others = (
            EmbeddingBagCollection(
                [EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=40, feature_names=KEYS)], is_weighted=True
            )
            for _ in range(2)
        )
        self.scaled = Scaled()
        self.position = PositionWeightedModule(10)
        self.positions = PositionWeightedModuleCollection({key: 10 for key in KEYS})
        self.dense = nn.Linear(4, 4)
        self.register_buffer("remap", torch.arange(20).flip(0))
        self._forward = forward

    def forward(self, batch: Batch) -> Any:
        return self._forward(self, batch)


def is_bags(module: nn.Module) -> bool:
    return isinstance(module, EmbeddingBagCollection)


def remapped(model: Model, batch: Batch) -> KeyedTensor:
    features = batch.sparse_features
    values = torch.index_select(model.remap, 0, features.values())
    return model.bags(KeyedJaggedTensor(features.keys(), values, features.weights(), lengths=features.lengths()))


def looked_at(model: Model, batch: Batch) -> KeyedTensor:
    features = batch.sparse_features
    for look in (
        lambda: features.values().max(),
        lambda: features.lengths().sum().item(),
        lambda: features.values().float().mean(),
        features.stride,
        features.keys,
        features.stride_per_key,
        features.length_per_key,
        features.weights_or_none,
    ):
        str(look())
    return model.bags(features)


def of_parts(model: Model, batch: Batch) -> KeyedTensor:
    part = batch.sparse_features["x"]
    weights = torch.ones(2, 1) * 0.5
    return model.bags(
        KeyedJaggedTensor(
            keys=KEYS,
            values=torch.cat([part.values(), part.values(), part.values() + 1]),
            lengths=torch.cat([part.lengths()] * 3).to(torch.int32),
            weights=torch.cat([part.weights() * weights[0], part.weights(), part.weights() * 2]),
        )
    )


PIPELINED: dict[str, Callable[[Any, Batch], Any]] = {
    "an attribute": lambda model, batch: model.bags(batch.sparse_features),
    "by name, and to a device": lambda model, batch: model.bags(features=batch.sparse_features.to(torch.device("cpu"))),
    "split": lambda model, batch: model.bags(
        KeyedJaggedTensor.concat([batch.sparse_features.split([1, 2])[i] for i in (1, 0)])
    ),
    "permuted": lambda model, batch: model.bags(batch.sparse_features.permute([2, 0, 1])),
    "remapped": remapped,
    "looked at": looked_at,
    "of parts": of_parts,
    "post-processed": lambda model, batch: model.bags(model.scaled(batch.sparse_features)),
    "post-processed twice": lambda model, batch: model.bags(
        model.scaled(model.scaled(batch.sparse_features.permute([1, 0, 2])))
    ),
}


def same(one: Any, other: Any) -> bool:
    assert isinstance(one, KeyedJaggedTensor) and isinstance(other, KeyedJaggedTensor)
    tensors = [(kjt.values(), kjt.lengths(), kjt.weights()) for kjt in (one, other)]
    return one.keys() == other.keys() and all(map(torch.equal, *tensors))


def seen_by(model: Model, batch: Batch) -> list[Any]:
    seen: list[Any] = []
    hook = model.bags.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append((*args, *kwargs.values())), with_kwargs=True
    )
    model(batch)
    hook.remove()
    return seen


@pytest.mark.parametrize("case", PIPELINED)
def test_inputs_are_those_of_a_forward(case: str) -> None:
    forward = PIPELINED[case]
    model = Model(lambda model, batch: model.dense(batch.dense_features) + forward(model, batch).values()[:, :4])
    graph = trace_inputs(model, is_bags)
    assert graph.names == ("bags",), "\n".join(map(str, graph.verdicts))
    assert "never calls it" in graph.verdicts[1].reason
    plain = copy.deepcopy(model)
    for seed in range(5):
        [(args, kwargs)] = graph(random_batch(seed))
        [[expected]] = seen_by(plain, random_batch(seed))
        [features] = (*args, *kwargs.values())
        assert same(features, expected), f"seed {seed}"
    assert graph.post_processing == (("scaled",) if "post" in case else ())
    assert torch.equal(model.scaled.seen, plain.scaled.seen)


REFUSALS: dict[str, tuple[Callable[[Any, Batch], Any], str]] = {
    "positions": (lambda model, batch: model.bags(model.positions(batch.sparse_features)), "position_weights"),
    "a position": (
        lambda model, batch: model.bags(
            KeyedJaggedTensor(
                ["x"],
                batch.sparse_features["x"].values(),
                model.position(batch.sparse_features["x"]).weights(),
                lengths=batch.sparse_features["x"].lengths(),
            )
        ),
        "'position', PositionWeightedModule",
    ),
    "output": (
        lambda model, batch: model.bags(
            KeyedJaggedTensor(KEYS, model.others(batch.sparse_features).values(), batch.sparse_features.lengths())
        ),
        "another sharded module, 'others'",
    ),
    "weights that are trained": (
        lambda model, batch: model.bags(
            KeyedJaggedTensor(KEYS, batch.sparse_features.values(), model.dense(batch.dense_features))
        ),
        "'dense', Linear with trainable",
    ),
    "values written": (
        lambda model, batch: [batch.sparse_features.values().add_(1), model.bags(batch.sparse_features)][1],
        "may change",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_depends_on_trained_values_is_refused(case: str) -> None:
    forward, reason = REFUSALS[case]
    verdict = trace_inputs(Model(forward), is_bags).verdicts[0]
    assert not verdict.pipelined and reason in verdict.reason, verdict


def test_a_recorded_forward_finds_features_by_attribute_and_nothing_that_is_new() -> None:
    model = Model(lambda model, batch: model.bags(batch.sparse_features).values().sum() + model.dense.bias)
    batch = random_batch(0)
    batch.sparse_features.offsets()
    with record_inputs(model, is_bags, batch) as inputs:
        model(batch)
    assert inputs.names == ("bags",), "\n".join(map(str, inputs.verdicts))
    other = random_batch(1)
    assert inputs(other)[0][0][0] is other.sparse_features
    model = Model(remapped)
    with record_inputs(model, is_bags, batch) as inputs:
        model(batch)
    assert inputs.names == () and "no part of the batch" in inputs.verdicts[0].reason


def test_sharded_is_what_torchrec_says() -> None:
    class Mine(ShardedModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()

        create_context = input_dist = compute = output_dist = unsharded_module_type = lambda self: None

    assert _sharded.is_sharded(Mine())
    assert not _sharded.is_sharded(Model(lambda model, batch: None).bags)


def test_distributed_model_parallel_is_taken_off() -> None:
    from torchrec.distributed.model_parallel import DistributedModelParallel

    inner = nn.Linear(1, 1)
    model = DistributedModelParallel.__new__(DistributedModelParallel)
    nn.Module.__init__(model)
    model._dmp_wrapped_module = inner
    assert _sharded.unwrap(model) == (inner, "_dmp_wrapped_module.")


def test_all_tensors_of_features_are_recorded():
    # Those of batch sizes of their own have indices, which torchrec's record_stream leaves out.
    device = Device()
    values, lengths, weights, inverse = (device.tensor(torch.ones(2, dtype=torch.int64)) for _ in range(4))
    features = KeyedJaggedTensor(
        ["x"], values, weights, lengths, stride_per_key_per_rank=[[2]], inverse_indices=(["x"], inverse.view(1, 2))
    )
    stream = device.Stream(torch.device("cuda"), 0)
    record_stream({"features": features}, stream)
    assert all(part.memory.recorded == {stream} for part in (values, lengths, weights, inverse))


def test_one_feature_is_compared_as_several_are() -> None:
    """Of a JaggedTensor, which has no keys."""

    def feature(
        values: list[int], weights: list[float] | None = None, lengths: tuple[int, ...] = (2, 1)
    ) -> JaggedTensor:
        given = None if weights is None else torch.tensor(weights)
        return JaggedTensor(torch.tensor(values), given, lengths=torch.tensor(lengths))

    one = feature([1, 2, 3], [0.1, 0.2, 0.3])
    for other, alike, equal in (
        (feature([1, 2, 3], [0.1, 0.2, 0.3]), True, True),
        (feature([1, 2, 4], [0.1, 0.2, 0.3]), True, False),
        (feature([1, 2, 3], [0.1, 0.2, 0.4]), True, False),
        (feature([1, 2, 3], [0.1, 0.2, 0.3], (1, 2)), True, False),
        (feature([1, 2], [0.1, 0.2], (1, 1)), False, False),
        (feature([1, 2, 3]), False, False),
    ):
        assert is_alike([one], [other]) == alike and is_equal_input([one], [other]) == equal
