"""Data parallelism: gradients averaged over a process group while backward still runs."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.utils import _to_kwargs

from farandole import _C
from farandole._default_device import default_device
from farandole.ddp._abandonment import AbandonsGroup
from farandole.ddp._agreement import refusing_together
from farandole.ddp._buffers import Buffers, broadcast, broadcast_for_evaluation
from farandole.ddp._changes import ParameterWatch
from farandole.ddp._comm_hook import TakesCommHook
from farandole.ddp._compiled import calls_may_be_compiled
from farandole.ddp._copying import build_again, state_of
from farandole.ddp._fused import is_added_of
from farandole.ddp._grads_elsewhere import tell_where_grads_are
from farandole.ddp._held_gradients import HoldsGradients
from farandole.ddp._ignored import ignore, ignored_in, named_buffers, named_parameters
from farandole.ddp._join import UnevenInputs, begin_forward
from farandole.ddp._layout import ShowsLayout
from farandole.ddp._manual_finalization import FinalizesManually
from farandole.ddp._options import (
    Replicas,
    bucket_elements,
    grad_place,
    group_in,
    group_of,
    home_of,
    input_device,
    largest_grad,
    parameters_of,
    replicas_of_experts,
    unused_policy,
)
from farandole.ddp._outputs import hides_nothing, tensors_in
from farandole.ddp._overruns import refuse_overrun_steps
from farandole.ddp._own_memory import check_module
from farandole.ddp._param_sync import ParamSync
from farandole.ddp._rewrapping import finish_gathers, take_over
from farandole.ddp._static_graph import SetsStaticGraph
from farandole.ddp._syncs_gradients import SyncsGradients
from farandole.ddp._syncs_parameters import SyncsParameters
from farandole.ddp._tensor_parallel import localize
from farandole.ddp._timeline import RecordsTimeline
from farandole.ddp._tuning import BucketTuner, is_auto

__all__ = ["DistributedDataParallel"]


class DistributedDataParallel(
    HoldsGradients,
    TakesCommHook,
    SyncsGradients,
    SyncsParameters,
    UnevenInputs,
    AbandonsGroup,
    FinalizesManually,
    SetsStaticGraph,
    RecordsTimeline,
    ShowsLayout,
):
    """Wraps a module so that each backward leaves the average gradient over the group in ``.grad``.

    Gradients live in contiguous buffers, laid out in reverse registration order (as Megatron-core's) and cut into
    buckets. Hooks in C++ issue the all-reduce of a bucket, in index order, as soon as its gradients are there, while
    the rest of backward runs; ``backward()`` returns when all are done. The result is that of
    ``torch.nn.parallel.DistributedDataParallel``: the sum over ranks of gradients scaled by 1 / size. Each trainable
    parameter gets a ``main_grad``; after a backward its ``.grad`` has the same memory, in the buffer, or, on the CPU
    where ranks share memory, where autograd computed it. It may be set to None, zeroed or replaced between steps.

    Constructing is a collective: all ranks must bring the same module (names, shapes, types, what is frozen) and the
    same options, else a ValueError on every rank names the first difference. Parameters and buffers are then
    overwritten with those of rank 0.

    With ``use_distributed_optimizer`` gradients are reduced so that each rank gets the average of its part of every
    bucket only, and :class:`DistributedOptimizer` updates that part; parameters become views of contiguous buffers,
    and gradients are in ``main_grad`` alone, ``.grad`` being None (as in Megatron-core's DistributedDataParallel).
    So it is with ``grad_reduce_in_fp32``, whose gradients have another type than their parameters.

    Args:
        module: with at least one parameter that requires a gradient, all of these on one device. A parameter with
            ``allreduce = False`` is an expert: it is reduced over ``expert_process_group``, and scaled as all others.
        device_ids: as torch's: None, or the one CUDA device that the module is on, to which inputs are moved.
        output_device: None, or that device.
        dim: 0.
        broadcast_buffers: by default True: each forward first overwrites buffers with those of rank 0; not after one inside
            ``no_sync`` or without gradients, as torch's. With False ranks keep their own from the start on, which need
            not have the same shapes either.
        init_sync: whether the model of rank 0 is given to all when it is wrapped.
        process_group: over which to average; by default the world.
        bucket_cap_mb: ``bucket_size`` in mebibytes of the widest gradients.
        find_unused_parameters: ``unused_parameters="skip"``. Nothing is searched for: what a backward has left out
            is known at its end, where its buckets are reduced.
        check_reduction: has no meaning, as torch's.
        gradient_as_bucket_view: gradients are views of buckets in every case, also where they need not be.
        static_graph: every backward is like the first one, which counts how many gradients each parameter gets: so
            reentrant checkpoints may share parameters. What it leaves out is skipped.
        device_mesh: instead of ``process_group``, of one dimension: a part of a larger mesh where parameters are sharded
            over the rest of that by torch's tensor parallelism.
        skip_all_reduce_unused_params, batched_grad_copy, lazy_bucket_allocation: torch's ways to save time or memory,
            which have no meaning here.
        forward_sync_buffers: as ``broadcast_buffers``, which then does not count, in forwards alone: all ranks begin with
            the buffers of rank 0.
        bucket_size: elements after which a bucket is closed; by default max(40e6, 1e6 x size). Smaller models than
            that overlap nothing unless this is smaller, too. "auto": the first backwards are measured with the default,
            or ``bucket_cap_mb``, then the size is tried that is predicted to leave the least exposed, and kept if
            backwards show a quarter of what it was to save. Rank 0 prints the choice with the reason
            (:meth:`bucket_tuning`).
        unused_parameters: what to do about a parameter that gets no gradient in a backward that synchronizes. Its
            bucket is reduced with what it holds, so that no rank hangs; then "error" raises a RuntimeError from
            ``backward()`` on every rank that names it; "zero_fill" goes on, and ``.grad`` is the average with zero in
            its place; "skip" leaves ``.grad`` what it was where no rank has a gradient.
        disable_bucketing: one bucket for all gradients of a type.
        overlap_grad_reduce: reduce buckets while backward runs, else after it; over farandole on the CPU all gradients
            then keep their own memory until they are reduced, beside the buffers.
        grad_reduce_in_fp32: accumulate and reduce in float32 what parameters have in a shorter type. So, and with
            use_distributed_optimizer, kernels may add to ``main_grad`` themselves (Megatron-core's and
            TransformerEngine's, or those of parameters that have ``grad_added_to_main_grad`` when they are wrapped).
        use_distributed_optimizer: each rank gets its part of the gradients, see above.
        overlap_param_gather: with it, the parameters that other ranks have updated come while the next forward runs,
            each bucket just before the first module that needs it; else :class:`DistributedOptimizer` waits for them.
        average_in_collective: average by the collective's AVG also where the backend would not do so by itself.
        reduce_scatter_with_fp32_accumulation: gradients of bfloat16 and float16 are added up in float32 and rounded once,
            over any backend; with use_distributed_optimizer. Over farandole on one host they are so anyway; elsewhere
            each rank gets all ranks' parts by an all-to-all, which takes the memory of a bucket meanwhile.
        calculate_per_token_loss: sum gradients instead of averaging them; ``scale_gradients`` divides them later.
        check_for_nan_in_grad: look for NaN and Inf in each bucket before it is reduced: then ``backward()`` raises on
            every rank, naming parameter, bucket and rank.
        check_for_large_grads: so for parameters whose gradient has a larger 2-norm than this; 0 for none.
        pad_buckets_for_high_nccl_busbw: buckets end at multiples of 65536 elements, with use_distributed_optimizer.
        expert_process_group: the ranks with the same experts; by default ``process_group``.
        instance_process_group: with several optimizer instances, the ranks that own the same parts of the state;
            ``process_group`` is then this rank's instance alone.
        expert_instance_process_group: so for experts.

    A backward that raised, in a module's own code for example, leaves other ranks waiting until the next forward,
    which ends the reduction, raises a RuntimeError that says so, and leaves the group usable. Where there may be no
    next forward, run each step inside :meth:`abandon_on_error`, or call :meth:`abandon`; ``farandole.pipelining`` does.
    """

    _set_params_and_buffers_to_ignore_for_model = staticmethod(ignore)  # the name that torch's users know
    device_ids: list[int] | None = None  # where inputs are moved to; this and the two below as torch's
    output_device: int | None = None
    dim = 0

    def __init__(
        self,
        module: torch.nn.Module,
        device_ids: Sequence[int | torch.device] | None = None,
        output_device: int | torch.device | None = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        *,
        device_mesh: DeviceMesh | None = None,
        skip_all_reduce_unused_params: bool = False,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
        lazy_bucket_allocation: bool = False,
        bucket_size: int | str | None = None,
        unused_parameters: str | None = None,
        disable_bucketing: bool = False,
        overlap_grad_reduce: bool = True,
        grad_reduce_in_fp32: bool = False,
        use_distributed_optimizer: bool = False,
        overlap_param_gather: bool = False,
        average_in_collective: bool = False,
        reduce_scatter_with_fp32_accumulation: bool = False,
        calculate_per_token_loss: bool = False,
        check_for_nan_in_grad: bool = False,
        check_for_large_grads: float = 0.0,
        pad_buckets_for_high_nccl_busbw: bool = False,
        expert_process_group: dist.ProcessGroup | None = None,
        instance_process_group: dist.ProcessGroup | None = None,
        expert_instance_process_group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__()
        group = group_in(process_group, device_mesh)
        with refusing_together(module, (group,)):
            if not isinstance(module, torch.nn.Module):
                raise TypeError(f"module is a {type(module).__name__}: expected a torch.nn.Module")
            if device_mesh is not None:
                localize(module, device_mesh)
            instances = instance_process_group
            if instances is not None:
                instances = group_of("instance_process_group", instances)
        with refusing_together(module, (group, instances)):
            for name, is_asked in (
                ("overlap_param_gather", overlap_param_gather),
                ("reduce_scatter_with_fp32_accumulation", reduce_scatter_with_fp32_accumulation),
            ):
                if is_asked and not use_distributed_optimizer:
                    raise ValueError(f"{name}=True: expected use_distributed_optimizer=True with it")
            self._input_device = input_device(module, device_ids, output_device, dim)
            if self._input_device is not None:
                self.device_ids, self.output_device = [self._input_device.index], self._input_device.index
            broadcasts = True if broadcast_buffers is None else broadcast_buffers
            shares_buffers = broadcasts or forward_sync_buffers is not None
            self.broadcast_buffers = broadcasts if forward_sync_buffers is None else forward_sync_buffers
            self.find_unused_parameters, self.static_graph = find_unused_parameters, static_graph
            self.gradient_as_bucket_view = gradient_as_bucket_view
            options = _C.ReducerOptions()
            self._unused_parameters = unused_parameters
            options.unused = unused_policy(
                unused_parameters, find_unused_parameters=find_unused_parameters, static_graph=static_graph
            )
            options.is_graph_static = static_graph
            options.broadcasts = init_sync
            tunes = is_auto(
                bucket_size,
                use_distributed_optimizer=use_distributed_optimizer,
                grad_reduce_in_fp32=grad_reduce_in_fp32,
                disable_bucketing=disable_bucketing,
                overlap_grad_reduce=overlap_grad_reduce,
            )
            options.bucket_size = bucket_elements(None if tunes else bucket_size, bucket_cap_mb, module)
            options.is_bucketed, options.in_one_group = not disable_bucketing, disable_bucketing
            options.overlaps = overlap_grad_reduce
            options.grad_dtype = torch.float32 if grad_reduce_in_fp32 else None
            options.is_sharded = use_distributed_optimizer
            options.home = home_of(grad_reduce_in_fp32 or use_distributed_optimizer, gradient_as_bucket_view)
            options.average_in_collective = average_in_collective
            options.accumulates_in_float = reduce_scatter_with_fp32_accumulation
            options.is_averaged = not calculate_per_token_loss
            options.checks_nan, options.largest_grad = check_for_nan_in_grad, largest_grad(check_for_large_grads)
            options.pads_for_bus_bandwidth = pad_buckets_for_high_nccl_busbw
            replicas = Replicas(group, instances)
            experts = replicas_of_experts(replicas, expert_process_group, expert_instance_process_group)
        self._build(module, replicas, experts, options, overlap_param_gather, shares_buffers=shares_buffers)
        if tunes:
            self._tuner = BucketTuner(self, options)

    def _build(
        self,
        module: torch.nn.Module,
        replicas: Replicas,
        experts: Replicas,
        options: _C.ReducerOptions,
        overlap_param_gather: bool,
        fuses: bool = False,
        shares_buffers: bool = True,
    ) -> None:
        """Once the arguments are known: also for those who take others."""
        UnevenInputs.__init__(self)
        self.module = module
        self.parameters_to_ignore = ignored_in(module)
        self.process_group = replicas.group
        self.replicas, self.experts = replicas, experts
        self.require_backward_grad_sync = True
        self.require_forward_param_sync = True
        self._no_sync_depth = 0
        self._divides_by_world = True
        self._options = options
        self._overlap_param_gather = overlap_param_gather
        with refusing_together(module, () if options.is_agreed else (replicas.group, replicas.instances)):
            self._is_added = is_added_of(module, grad_place(options) != "grad", fuses)
            parameters = parameters_of(module, self.parameters_to_ignore)
            if options.is_sharded:
                check_module(module, ((name, one) for name, one, *_ in parameters if one.requires_grad))
        self._tuner = None
        self._timeline: _C.GradTimeline | None = None  # where rounds are recorded
        self._optimizers = weakref.WeakSet()
        finish_gathers(module.parameters())
        self._reducer = _C.GradReducer(
            replicas.packed(),
            experts.packed(),
            parameters,
            list(named_buffers(module, self.parameters_to_ignore)) if shares_buffers else [],
            options,
            self._is_added,
        )
        if self._finalizes_manually:  # as before, where it is built again
            self._reducer.require_manual_end(True)
        main_grads = dict(self._reducer.main_grads())
        named = named_parameters(module, self.parameters_to_ignore)
        self._trainable = {name: parameter for name, parameter in named if name in main_grads}
        for name, parameter in self._trainable.items():
            parameter.main_grad, parameter.main_grad_place = main_grads[name], grad_place(options)
        first = next((p for p in (*self._trainable.values(), *module.parameters())), None)
        self.device = default_device(replicas.group) if first is None else first.device
        self._shared_buffers = Buffers(module, self.parameters_to_ignore)
        self._watch = ParameterWatch(
            module, self._trainable.values(), self.parameters_to_ignore, self._is_added is not None
        )
        self._param_sync = ParamSync(self, self._reducer, overlap_param_gather) if options.is_sharded else None
        take_over(self)
        if options.home == _C.GradHome.main_grad:
            tell_where_grads_are()
        elif not options.is_averaged or experts.size < replicas.size:
            refuse_overrun_steps()

    def __getstate__(self) -> dict[str, Any]:
        """To copy or pickle it, which is no collective: over the default group only, as torch's. Gradients stay behind."""
        return state_of(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        build_again(self, state)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._param_sync is not None:
            self._param_sync.before_forward(calls_may_be_compiled())
        if torch.is_grad_enabled():
            if torch.compiler.is_compiling():
                # With fullgraph=True an error that has the text.
                torch._dynamo.graph_break(
                    msg="fullgraph=True of farandole.ddp.DistributedDataParallel, which calls its reducer before the module: "
                    "expected fullgraph=False, or the module inside to be compiled"
                )
            change = "" if torch.compiler.is_compiling() else self._watch.change(self._reducer.rounds())
            self._reducer.prepare_forward(self.require_backward_grad_sync, change)
        broadcasts = self.broadcast_buffers and self.require_forward_param_sync
        source = 0
        if self._join_config.enable:
            source = begin_forward(self, broadcasts, torch.is_grad_enabled() and self.require_backward_grad_sync)
        if broadcasts:
            self._sync_buffers(source)
        if self._input_device is not None:
            (args,), (kwargs,) = _to_kwargs(args, kwargs, self._input_device, use_side_stream_for_tensor_copies=False)
        output = self.module(*args, **kwargs)
        # torch's: after a forward that will not be differentiated or reduced the next one needs no new buffers.
        self.require_forward_param_sync = torch.is_grad_enabled() and self.require_backward_grad_sync
        if self.require_forward_param_sync:
            is_own = torch.compiler.is_compiling() or self._watch.has_own()
            is_trained = self._reducer.watch_outputs(tensors_in(output), is_own)
            if not is_trained and is_own and self.module.training and hides_nothing(output):
                self._reducer.note_untrained()
        return output

    @property
    def device_type(self) -> str:
        """As torch's: "cpu" or "cuda"."""
        return self.device.type

    @property
    def forward_sync_buffers(self) -> bool:
        """Torch's newer name of ``broadcast_buffers``, once the module is wrapped."""
        return self.broadcast_buffers

    @forward_sync_buffers.setter
    def forward_sync_buffers(self, value: bool) -> None:
        self.broadcast_buffers = value

    def _sync_buffers(self, source: int = 0) -> None:
        buffers = self._shared_buffers.now()
        groups = [group for group in (self.replicas.instances, self.replicas.group) if group is not None]
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            broadcast(groups, buffers, source)
        else:
            broadcast_for_evaluation(groups, buffers, source)
