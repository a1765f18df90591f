"""What programs import from ``torch.distributed.pipelining.microbatch``: torch's own, which schedules here take."""

from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
    sum_reducer,
)

__all__ = ["TensorChunkSpec", "merge_chunks", "split_args_kwargs_into_chunks", "sum_reducer"]
