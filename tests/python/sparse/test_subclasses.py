"""Classes that override what torchrec's pipelines let them, with windows and scaled losses: as the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from farandole.sparse import PrefetchTrainPipelineSparseDist, TrainPipelineBase, TrainPipelineSparseDist
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import Mean, Recommender, assert_same, drain, make_batches, on_device, wrapped


class OwnBackward:
    """As it is written for torchrec's."""

    def _backward(self, losses: torch.Tensor) -> None:
        torch.sum(losses, dim=0).backward()
        self.backwards = getattr(self, "backwards", 0) + 1


class SparseDist(OwnBackward, TrainPipelineSparseDist[Any, torch.Tensor]):
    pass


class Base(OwnBackward, TrainPipelineBase[Any, torch.Tensor]):
    pass


class Prefetch(OwnBackward, PrefetchTrainPipelineSparseDist[Any, torch.Tensor]):
    pass


def scaler(init_scale: float | None) -> torch.amp.GradScaler | None:
    return None if init_scale is None else torch.amp.GradScaler(DEVICE, init_scale=init_scale)


def train(rank: int, world_size: int, kind: Any, grad_accum: int, init_scale: float | None) -> None:
    model, plain = wrapped(Recommender(1)), wrapped(Recommender(1))
    optimizer, plain_optimizer = (torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, plain))
    pipeline = kind(model, optimizer, DEVICE, grad_accum=grad_accum, grad_scaler=scaler(init_scale))
    batches = make_batches(1, 2 * grad_accum)
    outputs = drain(pipeline, iter(batches))
    scales = scaler(init_scale)
    for index, batch in enumerate(batches):
        is_last = index % grad_accum == grad_accum - 1
        if index % grad_accum == 0:
            plain_optimizer.zero_grad()
        plain.require_backward_grad_sync = is_last
        losses, output = plain(on_device(batch))
        loss = torch.sum(losses / grad_accum, dim=0)
        (loss if scales is None else scales.scale(loss)).backward()
        if is_last and scales is None:
            plain_optimizer.step()
        elif is_last:
            scales.step(plain_optimizer)
            scales.update()
        assert torch.equal(outputs[index], output)
    assert_same(model, plain)
    assert pipeline.backwards == len(batches)


@pytest.mark.filterwarnings("ignore:no sharded module has a cache")
@pytest.mark.parametrize("init_scale", [None, 1024.0, 1000.0])
@pytest.mark.parametrize("grad_accum", [1, 3])
@pytest.mark.parametrize("kind", [SparseDist, Base, Prefetch])
def test_a_backward_of_its_own_gets_what_is_to_be_summed(kind, grad_accum, init_scale):
    run_ranks(train, 2, "farandole", kind=kind, grad_accum=grad_accum, init_scale=init_scale)


def test_what_torchrecs_call_beside_is_told():
    for name in ("_prefetch", "_connect", "_commit_postproc_results"):
        with pytest.raises(TypeError, match=f"Own overrides {name}, which torchrec's pipelines call"):
            type("Own", (PrefetchTrainPipelineSparseDist,), {name: lambda self: None})


class Counting(TrainPipelineBase[Any, Any]):
    def progress(self, dataloader_iter: Any) -> Any:
        output = super().progress(dataloader_iter)
        self.steps = getattr(self, "steps", 0) + 1
        return output

    def reset(self) -> None:
        super().reset()
        self.steps = 0


def test_progress_and_reset_may_be_overridden():
    model = Mean().to(DEVICE)
    pipeline = Counting(model, torch.optim.SGD(model.parameters(), lr=0.1), DEVICE, execute_all_batches=False)
    assert len(drain(pipeline, iter(torch.ones(3, 2)))) == 2 == pipeline.steps
    assert len(pipeline.flush()) == 1 and pipeline.steps == 3
    pipeline.reset()
    assert pipeline.steps == 0
