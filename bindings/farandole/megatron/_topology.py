"""Where a rank stands: its pipeline, and the sizes that shapes and losses depend on."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from farandole.megatron import parallel_state as own_state


@dataclass(frozen=True)
class Topology:
    """Of one call of a forward-backward function."""

    pp_group: dist.ProcessGroup | None  # None: no pipeline
    tp_size: int
    cp_size: int
    split_rank: int | None  # the first rank of the decoder
    pg_collection: Any  # for finalize_model_grads_func

    @property
    def pp_size(self) -> int:
        return 1 if self.pp_group is None else self.pp_group.size()

    @property
    def pp_rank(self) -> int:
        return 0 if self.pp_group is None else self.pp_group.rank()

    def is_after_split(self, rank: int) -> bool:
        return self.split_rank is not None and rank >= self.split_rank


def parallel_state() -> Any:
    """Megatron-core's parallel_state if it is initialized, else farandole's own if that is, else None."""
    state: Any = sys.modules.get("megatron.core.parallel_state")  # whoever initialized it has imported it
    if state is not None and state.model_parallel_is_initialized():
        return state
    return own_state if own_state.model_parallel_is_initialized() else None


def set_virtual_rank(chunk: int | None) -> None:
    """Tells user functions that ask for it which chunk runs, whatever parallel_state they use."""
    if own_state.model_parallel_is_initialized():
        own_state.set_virtual_pipeline_model_parallel_rank(chunk)
    state: Any = sys.modules.get("megatron.core.parallel_state")
    if state is not None:
        # Its setter warns of itself from 0.17 on, once per call.
        state._VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK = chunk


def topology_of(p2p_communicator: Any, pg_collection: Any, pipelined: bool) -> Topology:
    """Of the groups that the caller gave, or else of the global state.

    Raises:
        NotImplementedError: the groups are those of a pipeline of several modules.
        ValueError: only one of communicator and collection was given.
        RuntimeError: nothing was given, and there is no global state.
    """
    for name, given in (("p2p_communicator", p2p_communicator), ("pg_collection", pg_collection)):
        if type(given).__name__.startswith("MultiModule"):
            raise NotImplementedError(f"{name} is a {type(given).__name__}, expected one of a single module")
    if pipelined and (p2p_communicator is None) != (pg_collection is None):
        raise ValueError(
            f"p2p_communicator is {p2p_communicator!r} and pg_collection is {pg_collection!r}, expected both or neither"
        )
    split_rank = _split_rank(parallel_state())
    if pg_collection is not None:
        for name in ("tp", "cp"):
            if not hasattr(pg_collection, name):
                raise ValueError(f"pg_collection has no {name}, expected the group (Megatron-core's attribute)")
        group = p2p_communicator.pp_group if pipelined else None
        return Topology(group, pg_collection.tp.size(), pg_collection.cp.size(), split_rank, pg_collection)
    state = parallel_state()
    if state is None and pipelined:
        raise RuntimeError(
            "model parallelism is not initialized, expected initialize_model_parallel() of megatron.core.parallel_state "
            "or of farandole.megatron.parallel_state before, or p2p_communicator and pg_collection"
        )
    if state is None:
        return Topology(None, 1, 1, None, None)
    return Topology(
        pp_group=state.get_pipeline_model_parallel_group() if pipelined else None,
        tp_size=state.get_tensor_model_parallel_world_size(),
        cp_size=1 if state is own_state else state.get_context_parallel_world_size(),
        split_rank=split_rank,
        pg_collection=None if state is own_state else _default_collection(state),
    )


def _split_rank(state: Any) -> int | None:
    # Megatron-core has it up to 0.8.
    getter = getattr(state, "get_pipeline_model_parallel_split_rank", None)
    return None if getter is None else getter()


def _default_collection(state: Any) -> Any:
    # What Megatron-core's schedules make, for finalize_model_grads_func; older ones have no such class.
    try:
        from megatron.core.process_groups_config import ProcessGroupCollection
    except ImportError:
        return None
    collection = ProcessGroupCollection()
    collection.tp = state.get_tensor_model_parallel_group()
    collection.cp = state.get_context_parallel_group()
    collection.embd = state.get_embedding_group(check_initialized=False)
    collection.pos_embd = state.get_position_embedding_group(check_initialized=False)
    collection.pp = state.get_pipeline_model_parallel_group()
    collection.dp_cp = state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=False)
    if hasattr(state, "get_tensor_and_data_parallel_group"):
        collection.tp_dp_cp = state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    collection.dp = state.get_data_parallel_group(with_context_parallel=False, partial_data_parallel=False)
    return collection
