"""farandole.sparse: train pipelines for recommenders, with torchrec's names and arguments."""

from farandole.sparse._base import TrainPipelineBase
from farandole.sparse._prefetch import PrefetchTrainPipelineSparseDist
from farandole.sparse._sparse_dist import EvalPipelineSparseDist, TrainPipelineSparseDist
from farandole.sparse._tracer import CannotTrace
from farandole.sparse._verdict import Verdict

__all__ = [
    "CannotTrace",
    "EvalPipelineSparseDist",
    "PrefetchTrainPipelineSparseDist",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
    "Verdict",
]
