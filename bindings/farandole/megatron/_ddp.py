"""Megatron-core's DistributedDataParallel by its names, arguments and meaning, over the reducer of farandole.ddp."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from farandole import _C, ddp
from farandole.ddp._agreement import refusing_together
from farandole.ddp._fused import reset_added
from farandole.megatron._ddp_config import check, instances_of, value_of
from farandole.megatron._ddp_groups import DataParallelGroups, groups_of

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(ddp.DistributedDataParallel):
    """Wraps one chunk of a model as ``megatron.core.distributed.DistributedDataParallel`` does.

    Gradients are added to ``main_grad`` in buffers that have Megatron-core's layout, ``.grad`` is left None, and
    :meth:`finish_grad_sync` makes averages of them (sums with ``config.calculate_per_token_loss``); until then nothing
    may be read. With ``overlap_grad_reduce`` buckets are reduced while the last backward runs, that is one outside
    :meth:`no_sync`. :meth:`zero_grad_buffer` begins each step.

    Constructing is a collective over the replicas: they must bring the same module and options, else all raise a
    ValueError that names the first difference. Parameters are not made equal: :meth:`broadcast_params` does so.

    Args:
        config: of the model; ``calculate_per_token_loss``, ``context_parallel_size`` and
            ``gradient_accumulation_fusion`` count, where it has them.
        ddp_config: a :class:`DistributedDataParallelConfig`, Megatron-core's or farandole's; it is not changed.
        module: parameters with ``allreduce = False`` are experts, reduced over ``expt_dp``; with the distributed
            optimizer one with ``shared_embedding = True`` gets a bucket of its own.
        disable_bucketing: one bucket for all gradients of a type, as without ``overlap_grad_reduce``, and on all
            pipeline stages but the first.
        pg_collection: groups by Megatron-core's names (dp, dp_cp, expt_dp, intra_dp_cp, intra_expt_dp,
            inter_dist_opt, pp); by default those of ``parallel_state``.
        full_param_layout: Megatron-core's; that made here is the same, or else this is a ValueError.
    """

    def __init__(
        self,
        config: Any,
        ddp_config: Any,
        module: torch.nn.Module,
        disable_bucketing: bool = False,
        pg_collection: Any = None,
        full_param_layout: Any = None,
    ) -> None:
        torch.nn.Module.__init__(self)
        if not isinstance(module, torch.nn.Module):
            raise TypeError(f"module is a {type(module).__name__}: expected a torch.nn.Module")
        self._input_device = None
        self._hidden: list[tuple[torch.Tensor, torch.Tensor | None]] = []  # of optimizers: gradients without memory
        self.broadcast_buffers = False
        self.config = config
        self.ddp_config = ddp_config
        self.full_param_layout = full_param_layout
        self.force_all_reduce = False
        groups = groups_of(pg_collection, getattr(config, "context_parallel_size", 1), instances_of(ddp_config))
        with refusing_together(module, (groups.dense.group, groups.dense.instances)):
            check(ddp_config)
            self._take_groups(groups, module)
            self.bucket_size = _bucket_size(ddp_config, module, groups, disable_bucketing)
            options = _options(config, ddp_config, self.bucket_size)
        options.in_one_group = disable_bucketing
        self.params_with_grad = [parameter for parameter in module.parameters() if parameter.requires_grad]
        overlap_param_gather = value_of(ddp_config, "overlap_param_gather")
        fuses = getattr(config, "gradient_accumulation_fusion", False)
        self._build(module, groups.dense, groups.experts, options, overlap_param_gather, fuses)
        reset_added(self.params_with_grad)  # kernels may look for the attribute
        if full_param_layout is not None:
            self._check_layout(full_param_layout)

    def _take_groups(self, groups: DataParallelGroups, module: torch.nn.Module) -> None:
        for name, parameter in module.named_parameters():
            if groups.expt_dp is None and not getattr(parameter, "allreduce", True):
                raise ValueError(f"parameter '{name}' is an expert: expected a group expt_dp in pg_collection")
        self.dp_group, self.dp_cp_group, self.intra_dp_cp_group = groups.dp, groups.dp_cp, groups.intra_dp_cp
        self.expt_dp_group = groups.dp_cp if groups.expt_dp is None else groups.expt_dp
        self.intra_expt_dp_group = groups.experts.group
        self.pp_group = groups.pp
        if groups.inter_dist_opt is not None:
            self.inter_dist_opt_group = groups.inter_dist_opt

    def _check_layout(self, full_param_layout: Any) -> None:
        names = {parameter: name for name, parameter in self._trainable.items()}
        expected = {}
        for layout in full_param_layout.layouts.values():
            expected.update({names.get(p): (span[0], span[1]) for p, span in layout.param_index_map.items()})
        for name, parameter in self._trainable.items():
            begin = parameter.main_grad.storage_offset()
            if expected.get(name) != (begin, begin + parameter.numel()):
                raise ValueError(
                    f"full_param_layout has parameter '{name}' at {expected.get(name)}, expected "
                    f"{(begin, begin + parameter.numel())}"
                )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards that run inside it accumulate; the first outside reduces. The backward decides, not its forward."""
        self._no_sync_depth += 1
        self._set_require_sync(False)
        try:
            yield
        except BaseException:
            self._no_sync_depth -= 1
            with contextlib.suppress(RuntimeError):  # of a group that was given up meanwhile: what was raised says why
                self._set_require_sync(True)
            raise
        self._no_sync_depth -= 1
        self._set_require_sync(True)

    def _abandon_step(self, reason: str) -> None:
        # Inside no_sync, too: the reduction of a step comes after its backwards.
        if not self._reducer.is_synchronized():
            self.abandon(reason)

    def start_grad_sync(self, *unused: Any) -> None:
        """Starts to reduce what has accumulated: what a config's ``grad_sync_func`` is."""
        super().start_grad_sync()

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Waits for the reduction, and makes it where none is under way; nothing where all is reduced already.

        Args:
            force_all_reduce: with the distributed optimizer each rank gets all of the gradients, not its part alone. So
                where the attribute of that name is True, which Megatron-LM's training loop sets before it saves them.
        """
        self._reducer.finish_sync()
        if (force_all_reduce or self.force_all_reduce) and value_of(self.ddp_config, "use_distributed_optimizer"):
            self._gather_gradients()

    def _gather_gradients(self) -> None:
        for bucket in self._reducer.buckets():
            group = (self.experts if bucket.is_expert else self.replicas).group
            part = bucket.grads.chunk(group.size())[group.rank()].clone()
            dist.all_gather_into_tensor(bucket.grads, part, group=group)

    def free_overlap_buffers(self) -> None:
        """Waits for gathers of parameters that are under way: called before checkpoints. There is no memory to free."""
        if self._param_sync is not None:
            self._param_sync.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Torch's: ``main_grad`` stays."""
        torch.nn.Module.zero_grad(self, set_to_none)

    def zero_grad_buffer(self) -> None:
        """Zeroes every ``main_grad``, for a step to begin."""
        super().zero_grad_buffer()

    def _reset_added(self) -> None:
        if getattr(self.config, "cuda_graph_impl", "none") != "transformer_engine":
            reset_added(self.params_with_grad)

    def scale_gradients(self, scaling_factor: float | torch.Tensor) -> None:
        """Multiplies every ``main_grad``. A tensor of one element is not read on the host."""
        if not isinstance(scaling_factor, torch.Tensor):
            super().scale_gradients(scaling_factor)
            return
        self._reducer.check_grads()
        # Not what lies between them in a bucket: zero times what is not finite would stay there.
        main_grads = [main_grad for _, main_grad in self._reducer.main_grads()]
        if main_grads:
            torch._foreach_mul_(main_grads, scaling_factor.reshape(()))
        self._scale_copies(scaling_factor)

    def offload_grad_buffers(self, synchronize: bool = True, empty_cache: bool = True) -> None:
        """Gives back the memory of gradients, which are lost, while others need it: between steps, until
        :meth:`restore_grad_buffers`. Forwards, backwards and optimizers' steps raise meanwhile; ``main_grad`` stays the
        same tensor, and must not be touched. Once more it does nothing.

        Args:
            synchronize: wait for the GPU before.
            empty_cache: torch's allocator gives it back, too.

        Raises:
            RuntimeError: gradients are being reduced.
        """
        if synchronize and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self._reducer.free_grads()
        # Scalers would read what optimizers have of them.
        graded = (one for optimizer in self._optimizers for one in (*optimizer._runs, *optimizer._graded))
        for tensor in dict.fromkeys(one.tensor for one in graded if one.tensor.grad is not None):
            self._hidden.append((tensor, tensor.grad))
            tensor.grad = None
        if empty_cache and self.device.type == "cuda":
            torch.cuda.empty_cache()

    def restore_grad_buffers(self, synchronize: bool = True) -> None:
        """Gradients have memory again, and are zero.

        Args:
            synchronize: wait for the GPU after it.
        """
        self._reducer.restore_grads()
        for tensor, grad in self._hidden:
            tensor.grad = grad
        self._hidden.clear()
        if synchronize and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def __getstate__(self) -> dict[str, Any]:
        raise RuntimeError(
            f"copying or pickling a {type(self).__name__} of Megatron's: copy its module and wrap the copy"
        )

    def state_dict(self, prefix: str = "", keep_vars: bool = False, destination: Any = None) -> Any:
        """Of the module that is wrapped: no name begins with ``module.``. Arguments have Megatron-core's order."""
        return self.module.state_dict(prefix=prefix, keep_vars=keep_vars, destination=destination)

    def state_dict_for_save_checkpoint(self, prefix: str = "", keep_vars: bool = False) -> Any:
        """The module's own function of that name."""
        return self.module.state_dict_for_save_checkpoint(prefix=prefix, keep_vars=keep_vars)

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        """As :meth:`state_dict`. Parameters stay where they are: ``assign`` must be False."""
        if assign:
            raise ValueError("load_state_dict(assign=True): expected False, parameters belong to buffers")
        return self.module.load_state_dict(state_dict, strict=strict)


def _bucket_size(
    ddp_config: Any, module: torch.nn.Module, groups: DataParallelGroups, disable_bucketing: bool
) -> int | None:
    if disable_bucketing or groups.pp_rank > 0 or not value_of(ddp_config, "overlap_grad_reduce"):
        return None
    buckets = value_of(ddp_config, "num_buckets")
    if buckets is not None:
        return max(1, sum(p.numel() for p in module.parameters() if p.requires_grad) // int(buckets))
    size = value_of(ddp_config, "bucket_size")
    return max(40_000_000, 1_000_000 * groups.dp.size()) if size is None else int(size)


def _options(config: Any, ddp_config: Any, bucket_size: int | None) -> _C.ReducerOptions:
    options = _C.ReducerOptions()
    options.home = _C.GradHome.main_grad
    options.ends_with_backward = False
    options.unused = _C.UnusedParameters.error_in_used_group
    options.broadcasts = False
    options.bucket_size = bucket_size
    options.is_bucketed = bucket_size is not None
    options.overlaps = value_of(ddp_config, "overlap_grad_reduce")
    options.is_graph_static = options.overlaps  # the first batch counts what each parameter gets
    options.grad_dtype = torch.float32 if value_of(ddp_config, "grad_reduce_in_fp32") else None
    options.is_sharded = value_of(ddp_config, "use_distributed_optimizer")
    options.accumulates_in_float = value_of(ddp_config, "reduce_scatter_with_fp32_accumulation")
    options.is_averaged = not getattr(config, "calculate_per_token_loss", False)
    options.average_in_collective = value_of(ddp_config, "average_in_collective")
    if options.average_in_collective and not options.is_averaged:
        raise ValueError("ddp_config.average_in_collective is True: expected False with calculate_per_token_loss")
    options.checks_nan = value_of(ddp_config, "check_for_nan_in_grad")
    options.largest_grad = float(value_of(ddp_config, "check_for_large_grads"))
    options.pads_for_bus_bandwidth = value_of(ddp_config, "pad_buckets_for_high_nccl_busbw")
    return options
