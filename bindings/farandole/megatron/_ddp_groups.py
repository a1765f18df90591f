"""Over which ranks Megatron's DistributedDataParallel reduces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from farandole.ddp._options import Replicas
from farandole.megatron import parallel_state as own_state
from farandole.megatron._calls import call_with_what_it_takes
from farandole.megatron._topology import parallel_state


@dataclass(frozen=True)
class DataParallelGroups:
    """By Megatron-core's names."""

    dp: dist.ProcessGroup
    dp_cp: dist.ProcessGroup
    intra_dp_cp: dist.ProcessGroup
    expt_dp: dist.ProcessGroup | None
    intra_expt_dp: dist.ProcessGroup | None
    inter_dist_opt: dist.ProcessGroup | None
    pp: Any  # a group, a list of them, or None

    @property
    def dense(self) -> Replicas:
        return Replicas(self.intra_dp_cp, self.inter_dist_opt)

    @property
    def experts(self) -> Replicas:
        return self.dense if self.intra_expt_dp is None else Replicas(self.intra_expt_dp, self.inter_dist_opt)

    @property
    def pp_rank(self) -> int:
        group = self.pp[0] if isinstance(self.pp, list) else self.pp
        return 0 if group is None else group.rank()


def groups_of(pg_collection: Any, context_parallel_size: int, instances: int) -> DataParallelGroups:
    """Of the collection, or else of the global state.

    Raises:
        ValueError: the collection lacks a group; it is named.
        RuntimeError: there is neither.
    """
    if pg_collection is not None:
        return _of_collection(pg_collection, context_parallel_size, instances)
    state = parallel_state()
    if state is None:
        raise RuntimeError(
            "model parallelism is not initialized, expected initialize_model_parallel() of megatron.core.parallel_state "
            "or of farandole.megatron.parallel_state before, or pg_collection"
        )
    if state is own_state:
        if instances > 1:
            raise ValueError(
                f"ddp_config.num_distributed_optimizer_instances is {instances}: expected megatron.core.parallel_state "
                "or pg_collection, which have the groups for it"
            )
        group = own_state.get_data_parallel_group()
        return DataParallelGroups(group, group, group, None, None, None, own_state.get_pipeline_model_parallel_group())

    def replicas(getter: Any, **options: bool) -> Any:
        return call_with_what_it_takes(getter, with_gtp_remat=False, **options)

    dense, experts = state.get_data_parallel_group, state.get_expert_data_parallel_group
    return DataParallelGroups(
        dp=replicas(dense, with_context_parallel=False, partial_data_parallel=False),
        dp_cp=replicas(dense, with_context_parallel=True, partial_data_parallel=False),
        intra_dp_cp=replicas(dense, with_context_parallel=True, partial_data_parallel=True),
        expt_dp=replicas(experts),
        intra_expt_dp=replicas(experts, partial_expert_data_parallel=True),
        inter_dist_opt=state.get_inter_distributed_optimizer_instance_group() if instances > 1 else None,
        pp=state.get_pipeline_model_parallel_group(),
    )


def _of_collection(collection: Any, context_parallel_size: int, instances: int) -> DataParallelGroups:
    def group(name: str, why: str) -> Any:
        found = getattr(collection, name, None)
        if found is None:
            raise ValueError(f"pg_collection has no {name}, expected the group (Megatron-core's attribute){why}")
        return found

    dp = group("dp", "")
    dp_cp = getattr(collection, "dp_cp", None)
    if dp_cp is None:
        dp_cp = (
            dp if context_parallel_size == 1 else group("dp_cp", f" with context_parallel_size={context_parallel_size}")
        )
    experts = getattr(collection, "expt_dp", None)
    intra, intra_experts, inter = dp_cp, experts, None
    if instances > 1:
        why = f" with num_distributed_optimizer_instances={instances}"
        intra, inter = group("intra_dp_cp", why), group("inter_dist_opt", why)
        intra_experts = None if experts is None else group("intra_expt_dp", why)
    return DataParallelGroups(dp, dp_cp, intra, experts, intra_experts, inter, getattr(collection, "pp", None))
