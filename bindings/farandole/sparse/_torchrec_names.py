"""torchrec's names that are not here, and what to use instead."""

from __future__ import annotations

_SPARSE = "TrainPipelineSparseDist"
_INTERNAL = (
    f"internals of torchrec's pipelines have no counterpart; {_SPARSE}(tracing=...) and explain() are what there is"
)
_COMPILE = "torch.compile the dense modules of the model"

INSTEAD = {
    "TrainPipelineSemiSync": f"use {_SPARSE}: nothing here computes with weights of the batch before the last",
    "TrainPipelineFusedSparseDist": f"use {_SPARSE}: lookups stay in the forward",
    "EvalPipelineFusedSparseDist": "use EvalPipelineSparseDist: lookups stay in the forward",
    "TrainPipelineSparseDistLite": f"use TrainPipelineBase (one batch ahead, copied only) or {_SPARSE}",
    "TrainPipelineSparseDistT": f"use {_SPARSE}(load_on_thread=True)",
    "TrainPipelineSparseDistBwdOpt": f"use {_SPARSE}, whose optimizer steps after the backward",
    "TrainPipelineSparseDistOptStash": f"use {_SPARSE}, which leaves the optimizer's state where it is",
    "TrainPipelineSparseDistEmbStash": f"use {_SPARSE}, which leaves tables where they are",
    "TrainPipelineSparseDistCompAutograd": f"use {_SPARSE}; {_COMPILE}, since no backward is compiled as a whole",
    "TrainPipelinePT2": f"use TrainPipelineBase or {_SPARSE}; {_COMPILE}, or all where torch can compile it",
    "TorchCompileConfig": "pass these to torch.compile",
    "TrainEvalHybridPipelineBase": f"use {_SPARSE} and, for the same model, EvalPipelineSparseDist: each keeps its batches",
    "EvalPipelineCPUSparse": "use EvalPipelineSparseDist, with model and tables on one device",
    "StagedTrainPipeline": f"use {_SPARSE}; do the work of further stages in the iterator, with load_on_thread=True",
    "PipelineStage": "do the work of stages in the iterator, with load_on_thread=True",
    "StageOut": "do the work of stages in the iterator, with load_on_thread=True",
    "SparseDataDistUtil": f"use {_SPARSE}, which has the input_dist in it",
    "GradientAccumulationWrapper": f"use {_SPARSE}(grad_accum=n), which divides losses by n",
    "GradientAccumulationConfig": f"use {_SPARSE}(grad_accum=n), which divides losses by n",
    "DataLoadingThread": f"use {_SPARSE}(load_on_thread=True)",
    "TrainPipeline": "use TrainPipelineBase, from which all pipelines here come",
    "ModelDetachedException": "nothing raises it: progress() attaches a detached model again",
    "TrainPipelineContext": _INTERNAL,
    "PrefetchTrainPipelineContext": _INTERNAL,
    "EmbeddingTrainPipelineContext": _INTERNAL,
    "Tracer": _INTERNAL,
    "ArgInfo": _INTERNAL,
    "ArgInfoStepFactory": _INTERNAL,
    "CallArgs": _INTERNAL,
}

_BLOCKS = "progress() is all of a step here, and parts of it are not methods"
_LOAD = "do that in the iterator, with load_on_thread=True"
_DIST = "input_dist of the model's modules is called as it is; change it there"
_INPUTS = "inputs of sharded modules are found from the batch; explain() tells how"

# Methods of torchrec's pipelines that are called, or overridden, and are not here.
METHODS = {
    "fill_pipeline": _BLOCKS,
    "enqueue_batch": _LOAD,
    "dequeue_batch": _BLOCKS,
    "copy_batch_to_gpu": f"batches move by their to(device, non_blocking); what else there is to do, {_LOAD}",
    "inplace_copy_batch_to_gpu": f"batches move by their to(device, non_blocking); what else there is to do, {_LOAD}",
    "start_sparse_data_dist": _DIST,
    "wait_sparse_data_dist": _DIST,
    "sync_embeddings": "set dmp_collection_sync_interval_batches=None and call sync() of the DMPCollection",
    "_next_batch": _LOAD,
    "_connect": _BLOCKS,
    "_reset_data_iter": "override reset()",
    "_copy_batch_to_gpu": f"batches move by their to(device, non_blocking); what else there is to do, {_LOAD}",
    "_wait_for_batch": _BLOCKS,
    "_fill_pipeline": _BLOCKS,
    "_start_sparse_data_dist": _DIST,
    "_wait_sparse_data_dist": _DIST,
    "_create_context": _BLOCKS,
    "_set_module_context": _BLOCKS,
    "_init_pipelined_modules": _INPUTS,
    "_pipeline_model": _INPUTS,
    "_pipelined_modules": _INPUTS,
    "_pipelined_forward_type": _INPUTS,
    "_commit_postproc_results": _INPUTS,
    "_prefetch": "prefetch() of the model's modules is called as it is; change it there, or set prefetch_ahead",
    "batches": "in_flight and unused_batches are what there is",
    "contexts": "in_flight and unused_batches are what there is",
}


def of_missing(kind: str, name: str) -> str:
    """Of an AttributeError."""
    told = f", which torchrec's pipelines have: {METHODS[name]}" if name in METHODS else ""
    return f"{kind!r} object has no attribute {name!r}{told}"


def refuse_overrides(kind: type) -> None:
    """
    Raises:
        TypeError: it overrides what torchrec's pipelines would call, and nothing here does.
    """
    for name in METHODS:
        if name in vars(kind):
            raise TypeError(
                f"{kind.__qualname__} overrides {name}, which torchrec's pipelines call and those here do not: "
                f"{METHODS[name]}"
            )
