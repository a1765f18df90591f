"""torchrec's names that are not here, and what to use instead."""

from __future__ import annotations

_SPARSE = "TrainPipelineSparseDist"
_INTERNAL = (
    f"internals of torchrec's pipelines have no counterpart; {_SPARSE}(tracing=...) and explain() are what there is"
)

INSTEAD = {
    "TrainPipelineSemiSync": f"use {_SPARSE}: nothing here computes with weights of the batch before the last",
    "TrainPipelineFusedSparseDist": f"use {_SPARSE}: lookups stay in the forward",
    "EvalPipelineFusedSparseDist": "use EvalPipelineSparseDist: lookups stay in the forward",
    "TrainPipelineSparseDistLite": f"use TrainPipelineBase (one batch ahead, copied only) or {_SPARSE}",
    "TrainPipelineSparseDistT": f"use {_SPARSE}(load_on_thread=True)",
    "TrainPipelineSparseDistBwdOpt": f"use {_SPARSE}, whose optimizer steps after the backward",
    "TrainPipelineSparseDistOptStash": f"use {_SPARSE}, which leaves the optimizer's state where it is",
    "TrainPipelineSparseDistEmbStash": f"use {_SPARSE}, which leaves tables where they are",
    "TrainPipelineSparseDistCompAutograd": f"use {_SPARSE} inside torch._dynamo.compiled_autograd of your own",
    "TrainPipelinePT2": f"use TrainPipelineBase, or {_SPARSE}, over a model with torch.compile",
    "TorchCompileConfig": "pass these to torch.compile",
    "TrainEvalHybridPipelineBase": f"use {_SPARSE}: with model.eval() it runs forward only",
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
