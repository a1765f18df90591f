"""farandole.sparse: train pipelines for recommenders, with torchrec's names and arguments."""

from farandole.sparse._base import TrainPipelineBase
from farandole.sparse._prefetch import PrefetchTrainPipelineSparseDist
from farandole.sparse._sparse_dist import EvalPipelineSparseDist, TrainPipelineSparseDist
from farandole.sparse._torchrec_names import INSTEAD
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


def __getattr__(name: str) -> object:
    if name in INSTEAD:  # an AttributeError's text would not reach who imports it
        raise ImportError(f"farandole.sparse has no {name}, which torchrec has: {INSTEAD[name]}", name=__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
