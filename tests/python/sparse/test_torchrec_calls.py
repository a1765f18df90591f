"""Calls that were written for torchrec's pipelines: taken with the same meaning, or refused by name."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch

import farandole.sparse
from farandole.sparse import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from farandole.sparse._requirements import torchrec_reason
from support.devices import DEVICE
from support.processes import run_ranks
from support.recommenders import Recommender, drain, make_batches, on_device, plain_loop, wrapped

# After (model, optimizer, device), in torchrec 1.6.1.
POSITIONS = {
    TrainPipelineBase: ["custom_model_fwd", "enable_inplace_copy_batch"],
    TrainPipelineSparseDist: [
        "execute_all_batches",
        "apply_jit",
        "context_type",
        "pipeline_postproc",
        "custom_model_fwd",
        "dmp_collection_sync_interval_batches",
        "enqueue_batch_after_forward",
        "enable_inplace_copy_batch",
    ],
    PrefetchTrainPipelineSparseDist: [
        "execute_all_batches",
        "apply_jit",
        "pipeline_postproc",
        "custom_model_fwd",
        "enable_inplace_copy_batch",
    ],
    EvalPipelineSparseDist: ["apply_jit", "enable_inplace_copy_batch"],
}
REFUSED = {
    "execute_all_batches": "no",
    "apply_jit": True,
    "context_type": int,
    "pipeline_postproc": 3,
    "custom_model_fwd": False,
    "dmp_collection_sync_interval_batches": 0,
    "enqueue_batch_after_forward": True,
    "enable_inplace_copy_batch": True,
}


class TrainPipelineContext:
    """As torchrec's, whose module it says to be from."""


TrainPipelineContext.__module__ = "torchrec.distributed.train_pipeline.pipeline_context"

TAKEN = {
    "execute_all_batches": False,
    "apply_jit": False,
    "context_type": TrainPipelineContext,
    "pipeline_postproc": True,
    "custom_model_fwd": lambda batch: (batch, batch),
    "dmp_collection_sync_interval_batches": 10,  # of a model that is no DMPCollection: torchrec's does not look at it
    "enqueue_batch_after_forward": False,
    "enable_inplace_copy_batch": False,
}


def made(kind: Any, *positional: Any, **named: Any) -> Any:
    model = torch.nn.Linear(2, 2)
    return kind(model, torch.optim.SGD(model.parameters(), lr=0.1), "cpu", *positional, **named)


@pytest.mark.parametrize("kind", POSITIONS)
def test_positions_are_torchrecs(kind):
    names = POSITIONS[kind]
    pipeline = made(kind, *(TAKEN[name] for name in names))
    assert pipeline._execute_all_batches is ("execute_all_batches" not in names)
    if "custom_model_fwd" in names:
        assert pipeline._model_fwd is TAKEN["custom_model_fwd"]
    for index, name in enumerate(names):
        with pytest.raises((TypeError, ValueError), match=f"^{name}="):
            made(kind, *(TAKEN[before] for before in names[:index]), REFUSED[name])
        with pytest.raises((TypeError, ValueError), match=f"^{name}="):
            made(kind, **{name: REFUSED[name]})
        made(kind, **{name: TAKEN[name]})
    with pytest.raises(TypeError, match=r"multiple values for .*'" + names[0]):
        made(kind, TAKEN[names[0]], **{names[0]: TAKEN[names[0]]})
    with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'aply_jit'"):
        made(kind, aply_jit=False)


@pytest.mark.parametrize("kind", POSITIONS)
def test_pipelines_are_generic_in_batch_and_output_as_torchrecs(kind):
    class Own(kind[list, torch.Tensor]):  # type: ignore[valid-type,misc]
        def _backward(self, losses: torch.Tensor) -> None:
            super()._backward(2 * losses)

    pipeline = made(Own)
    assert isinstance(pipeline, kind) and isinstance(made(kind[list, torch.Tensor]), kind)


@pytest.mark.parametrize(
    "name", ["fill_pipeline", "enqueue_batch", "start_sparse_data_dist", "_next_batch", "contexts"]
)
def test_methods_of_torchrecs_pipelines_that_are_not_here_are_told(name):
    pipeline = made(TrainPipelineSparseDist)
    with pytest.raises(AttributeError, match=rf"no attribute '{name}', which torchrec's pipelines have: \w.*"):
        getattr(pipeline, name)
    assert not hasattr(pipeline, name)
    with pytest.raises(
        TypeError, match=rf"Own overrides {name}, which torchrec's pipelines call and those here do not"
    ):
        type("Own", (TrainPipelineSparseDist,), {name: lambda self: None})
    with pytest.raises(AttributeError, match=r"no attribute 'fil_pipeline'$"):
        pipeline.fil_pipeline  # noqa: B018


def attach_as_torchrecs(rank: int, world_size: int) -> None:
    model = wrapped(Recommender(1))
    plain = wrapped(Recommender(1))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
    pipeline = TrainPipelineSparseDist(model, optimizers[0], DEVICE)
    batches = make_batches(1, 6)
    loader = iter(batches)
    outputs = [pipeline.progress(loader) for _ in range(2)]
    for call in (
        lambda: pipeline.attach(model, False),
        lambda: pipeline.attach(model, sparse_dist=False),
        lambda: pipeline.attach(model, True),
    ):
        pipeline.detach()
        call()
        outputs.append(pipeline.progress(loader))
    outputs += drain(pipeline, loader)
    assert all(map(torch.equal, outputs, plain_loop(plain, optimizers[1], batches))) and len(outputs) == 6


def test_attach_takes_torchrecs_second_argument():
    run_ranks(attach_as_torchrecs, 2, "farandole")


def evaluate_all(rank: int, world_size: int) -> None:
    model = wrapped(Recommender(1)).eval()
    batches = make_batches(1, 5)
    pipeline = EvalPipelineSparseDist(model, torch.optim.SGD(model.parameters(), lr=0.1), DEVICE, False)
    outputs = drain(pipeline, iter(batches))
    pipeline.detach()
    assert len(outputs) == 5
    assert all(torch.equal(output, model(on_device(batch))[1]) for output, batch in zip(outputs, batches, strict=True))


def test_evaluation_with_apply_jit_by_position_has_all_batches():
    run_ranks(evaluate_all, 2, "farandole")


# Public classes of torchrec.distributed.train_pipeline 1.6.1 and its experimental_pipelines that have no counterpart.
OTHERS = [
    "TrainPipelineSemiSync",
    "TrainPipelineFusedSparseDist",
    "EvalPipelineFusedSparseDist",
    "TrainPipelineSparseDistLite",
    "TrainPipelineSparseDistT",
    "TrainPipelineSparseDistBwdOpt",
    "TrainPipelineSparseDistOptStash",
    "TrainPipelineSparseDistEmbStash",
    "TrainPipelineSparseDistCompAutograd",
    "TrainPipelinePT2",
    "TorchCompileConfig",
    "TrainEvalHybridPipelineBase",
    "EvalPipelineCPUSparse",
    "StagedTrainPipeline",
    "StageOut",
    "SparseDataDistUtil",
    "GradientAccumulationWrapper",
    "GradientAccumulationConfig",
    "DataLoadingThread",
    "TrainPipeline",
    "TrainPipelineContext",
    "Tracer",
    "ArgInfo",
    "ArgInfoStepFactory",
    "CallArgs",
    "ModelDetachedException",
]


@pytest.mark.parametrize("name", OTHERS)
def test_names_that_are_not_here_say_what_to_use(name):
    with pytest.raises(ImportError, match=rf"^farandole\.sparse has no {name}, which torchrec has: .*\w.*$"):
        exec(f"from farandole.sparse import {name}")


def test_names_of_nobody_are_no_attributes():
    with pytest.raises(ImportError, match="cannot import name 'TrainPipelineOfNobody'"):
        exec("from farandole.sparse import TrainPipelineOfNobody")
    assert not hasattr(farandole.sparse, "TrainPipelineOfNobody")


@pytest.mark.skipif(torchrec_reason() is not None, reason=torchrec_reason() or "")
def test_no_name_of_torchrecs_is_left_out():
    theirs = importlib.import_module("torchrec.distributed.train_pipeline")
    names = {name for name, value in vars(theirs).items() if isinstance(value, type) and not name.startswith("_")}
    assert names - set(farandole.sparse.__all__) <= set(OTHERS)
