"""Names of the ranges that a profiler shows: those that torchrec's pipelines have, class by class."""

from __future__ import annotations

from dataclasses import dataclass

_WAIT, _FORWARD = "## wait_for_batch ##", "## forward ##"
_BACKWARD, _OPTIMIZER = "## backward ##", "## optimizer ##"
_COPY = "## copy_batch_to_gpu ##"


@dataclass(frozen=True, slots=True)
class Ranges:
    """{} is the number of the batch."""

    next_batch: str = "## next_batch ##"
    copy: str = "## copy_batch_to_gpu {} ##"
    is_next_in_copy: bool = True
    wait_for_batch: str = "## wait_for_batch {} ##"
    start_dist: str = "## start_sparse_data_dist {} ##"
    wait_dist: str = "## wait_sparse_data_dist {} ##"
    forward: str = "## forward {} ##"
    backward: str = "## backward {} ##"
    optimizer: str = "## optimizer {} ##"


OF_SPARSE_DIST = Ranges()
OF_BASE = Ranges(
    next_batch="## load batch {} from dataloader (host) ##",
    copy=_COPY,
    is_next_in_copy=False,
    wait_for_batch=_WAIT,
    forward=_FORWARD,
    backward=_BACKWARD,
    optimizer=_OPTIMIZER,
)
OF_PREFETCH = Ranges(
    wait_for_batch=_WAIT,
    start_dist="## start_sparse_data_dist ##",
    wait_dist="## wait_sparse_data_dist ##",
    forward=_FORWARD,
    backward=_BACKWARD,
    optimizer=_OPTIMIZER,
)
OF_EVAL = Ranges(
    next_batch="## load_batch ##", copy=_COPY, is_next_in_copy=False, wait_for_batch=_WAIT, forward=_FORWARD
)
