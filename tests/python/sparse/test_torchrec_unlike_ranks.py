"""torchrec's modules, where one rank's forward does more than those of the others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from farandole.sparse import TrainPipelineSparseDist
from sparse.torchrec_needed import needs_torchrec
from support.processes import run_ranks
from support.recommenders import drain, plain_loop

pytestmark = needs_torchrec


def train(rank: int, world_size: int, what: str) -> None:
    import torchrec_models as models

    class Recommender(models.Recommender):
        def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            if what == "prints" and dist.get_rank() == 0:
                print("largest id", batch.first.values().max())
            if what == "asks" and dist.get_rank() == 1 and batch.first.values().max() > models.ROWS:
                raise ValueError("no such row")
            if what == "writes" and dist.get_rank() == 1:
                batch.second.values().clamp_(max=models.ROWS - 1)
            return super().forward(batch)

    models.Recommender = Recommender
    kind = models.Kind(("table", "row", "column"), ("table",), "plain", False, False, 3)
    (model, optimizer), (plain, plain_optimizer) = models.made(kind), models.made(kind)
    plain.load_state_dict(model.state_dict())
    pipeline = TrainPipelineSparseDist(model, optimizer, models.CPU)
    for epoch, number in enumerate([5, 3 + rank]):
        expected = plain_loop(plain, plain_optimizer, models.make_batches(kind, epoch, number)[: 5 - 2 * epoch])
        outputs = drain(pipeline, iter(models.make_batches(kind, epoch, number)))
        assert len(outputs) == len(expected) and all(map(torch.equal, outputs, expected))
    theirs = models.weights(plain)
    for name, value in models.weights(model).items():
        assert torch.equal(value, theirs[name]), name
    told = pipeline.explain()
    if what == "asks":
        assert "first: pipelined" in told and "by hooks, since rank 1: torch.fx cannot trace the model" in told, told
    elif what == "writes":
        assert "third: pipelined" in told and ": not pipelined: on rank 1: " in told, told
    else:  # which changes nothing
        assert "not pipelined" not in told, told


@pytest.mark.filterwarnings("ignore:sharded modules exchange their inputs")
@pytest.mark.parametrize("what", ["prints", "asks", "writes"])
def test_ranks_with_other_forwards_train_as_the_plain_loop(what):
    run_ranks(train, 2, "farandole", timeout=60, what=what)
