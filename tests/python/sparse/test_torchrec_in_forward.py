"""torchrec's modules, whose inputs are computed with a buffer that changes before each forward."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch

from farandole.sparse import TrainPipelineSparseDist
from sparse.torchrec_needed import needs_torchrec
from support.processes import run_ranks
from support.recommenders import plain_loop

pytestmark = needs_torchrec


def shifted_models() -> Any:
    import torchrec_models as models
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    class Recommender(models.Recommender):
        def __init__(self, kind: Any) -> None:
            super().__init__(kind)
            self.register_buffer("offset", torch.zeros((), dtype=torch.int64))

        def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            ids = batch.second
            shifted = KeyedJaggedTensor(ids.keys(), (ids.values() + self.offset) % models.ROWS, lengths=ids.lengths())
            return super().forward(models.Batch(batch.dense, batch.first, shifted, batch.third, batch.labels))

    models.Recommender = Recommender
    return models


def offset_of(model: torch.nn.Module) -> torch.Tensor:
    [offset] = [buffer for name, buffer in model.named_buffers() if name.endswith("offset")]
    return offset


def train(rank: int, world_size: int, seed: int) -> None:
    models = shifted_models()
    kind = dataclasses.replace(models.random_kind(random.Random(seed)), second="plain")
    (model, optimizer), (plain, plain_optimizer) = models.made(kind), models.made(kind)
    plain.load_state_dict(model.state_dict())
    pipeline = TrainPipelineSparseDist(model, optimizer, models.CPU, strict=True)
    turn = 0
    for epoch, numbers in enumerate([(7, 5), (3, 4), (14, 20), (4, 4)]):
        batches = models.make_batches(kind, seed + epoch, numbers[rank])
        again = models.make_batches(kind, seed + epoch, numbers[rank])
        iterator = iter(batches)
        for number in range(min(numbers)):
            turn += 1
            for each in (model, plain):
                offset_of(each).fill_(turn)
            output = pipeline.progress(iterator)
            [expected] = plain_loop(plain, plain_optimizer, [again[number]])
            assert torch.equal(output, expected), f"seed {seed}, epoch {epoch}, batch {number}: {kind}"
        with pytest.raises(StopIteration):
            pipeline.progress(iterator)
    theirs = models.weights(plain)
    for name, value in models.weights(model).items():
        assert torch.equal(value, theirs[name]), f"seed {seed}, {name}: {kind}"
    assert "have exchanged inputs once, in the forward, since " in pipeline.explain(), f"seed {seed}: {kind}"


@pytest.mark.filterwarnings("ignore:batch", "ignore:sharded modules exchange their inputs")
@pytest.mark.parametrize("turn", range(3))
def test_batches_that_stay_in_their_forward_train_as_the_plain_loop(turn):
    seed = random.randrange(1 << 20)
    print(f"seed {seed}")
    run_ranks(train, 2, "farandole", timeout=120, seed=seed)


def reorder(rank: int, world_size: int) -> None:
    models = shifted_models()
    kind = models.Kind(("table", "row", "column"), (), "plain", False, False, 4)
    model, optimizer = models.made(kind)
    pipeline = TrainPipelineSparseDist(model, optimizer, models.CPU, strict=True)
    batches = models.make_batches(kind, 1, 9)
    batches[7] = dataclasses.replace(batches[7], first=batches[7].first.permute([1, 0, 2]))
    iterator = iter(batches)
    for number in range(9):
        offset_of(model).fill_(number)
        if number != 7:
            pipeline.progress(iterator)
            continue
        with pytest.raises(ValueError, match=r"is given features with the keys .*: expected \['f0', 'f1', 'f2'\] in"):
            pipeline.progress(iterator)
    assert "once, in the forward" in pipeline.explain()


@pytest.mark.filterwarnings("ignore:batch")
def test_keys_in_another_order_than_at_first_are_refused_there_too():
    run_ranks(reorder, 2, "farandole", timeout=120)
