"""Pipelines with the names and arguments of Megatron-core: its training loops run unchanged.

    from farandole.megatron import get_forward_backward_func

    losses = get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iterator, model=model, num_microbatches=8,
        seq_length=1024, micro_batch_size=2,
    )

:class:`DistributedDataParallel` and :func:`finalize_model_grads` are Megatron-core's, too, over the engine of
:mod:`farandole.ddp`. Groups and sizes come from ``megatron.core.parallel_state`` where that is initialized, from the
same functions of :mod:`farandole.megatron.parallel_state` in programs without Megatron-core, or from the arguments
``p2p_communicator`` and ``pg_collection``. The plans are 1F1B and interleaved 1F1B; what runs them, and over which backends, is what
:mod:`farandole.pipelining` has. docs/megatron.md says what is the same and what is not.
"""

from farandole.megatron import parallel_state
from farandole.megatron._config import ModelParallelConfig, ModelType
from farandole.megatron._ddp import DistributedDataParallel
from farandole.megatron._ddp_config import DistributedDataParallelConfig
from farandole.megatron._finalize import finalize_model_grads
from farandole.megatron._legacy import LegacyForwardBackward
from farandole.megatron._models import get_attr_wrapped_model, get_model_config
from farandole.megatron._p2p import P2PCommunicator
from farandole.megatron._schedules import (
    ForwardBackward,
    forward_backward_no_pipelining,
    forward_backward_pipelining_with_interleaving,
    forward_backward_pipelining_without_interleaving,
    get_forward_backward_func,
)

__all__ = [
    "DistributedDataParallel",
    "DistributedDataParallelConfig",
    "ForwardBackward",
    "LegacyForwardBackward",
    "ModelParallelConfig",
    "ModelType",
    "P2PCommunicator",
    "finalize_model_grads",
    "forward_backward_no_pipelining",
    "forward_backward_pipelining_with_interleaving",
    "forward_backward_pipelining_without_interleaving",
    "get_attr_wrapped_model",
    "get_forward_backward_func",
    "get_model_config",
    "parallel_state",
]
