"""One stage of a pipeline, as the user describes it."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.hooks import RemovableHandle

from farandole.pipelining._devices import stage_device
from farandole.pipelining._forward_context import Contexts, PipelineStageInfo
from farandole.pipelining._refusal import RefusesOnAllRanks
from farandole.pipelining._sendable import GetMesh, Meshes, local_part
from farandole.pipelining._stage_edges import Edge

if TYPE_CHECKING:
    from farandole.pipelining._torch_stages import TracedArguments

Declared = list[tuple[list[int], torch.dtype]]


class PipelineStage(metaclass=RefusesOnAllRanks):
    """A module that is one stage of a sequential pipeline. A rank has one of these for each of its stages.

    Args:
        submodule: called with the first stage's arguments, or with what the stage before returned: the
            items of a tuple or list, or anything else as the only argument. A tensor or a tuple of tensors
            is fastest; whatever else can be pickled is handed over, too, and takes one more message: nested
            structures, None, numbers, texts, objects, with at least one tensor, wherever it is. Values may
            differ from step to step, but not how many tensors there are, while inputs have the same shapes;
            and what is no tensor may take twice the bytes that it took first (256 count as one, more is an
            error, and the step after it has the room).
            The last stage returns anything that the loss takes. It may be wrapped for data parallelism by
            ``farandole.ddp.DistributedDataParallel`` or torch's, or sharded by ``fully_shard`` (FSDP2). Of a DTensor,
            alone or in tuples, lists and dicts, the local part is sent, and the next stage is called with a DTensor.
            It may be on the meta device until the first step, and ``submod`` be set to another module between steps.
        stage_index: from 0; which stages live on which rank, the schedule says.
        num_stages: of the whole pipeline.
        device: where the submodule lives: cpu, or a GPU ("cuda": the current one), the same for all stages of a rank.
            On a GPU a step is launched without waiting for it, as torch's own operations are; messages wait for the
            current stream, and it for them. The group needs a backend for the CPU, too, for what ranks agree on.
        input_args: example inputs of one microbatch. Shapes are learned in the first step
            anyhow; what is declared here is checked, and a mismatch is an error on all ranks.
        output_args: example outputs of one microbatch, checked likewise.
        group: process group of the pipeline; the default group if None.
        dw_builder: of a submodule whose own autograd functions put the gradients of their weights off. Called after
            each backward of a microbatch, it returns a function that computes what that one has put off: run at once
            in a whole backward, in W where a schedule has backwards in two halves (I is then all that autograd does).
            Such a submodule cannot be wrapped for data parallelism.
        get_mesh: ``get_mesh(mesh_dim_names, mesh_layout)`` gives the mesh of this rank for a DTensor that arrives from
            one with those names. Without it, that is a mesh of the submodule's parameters or of ``input_args`` and
            ``output_args``.
        input_grads, output_grads: torch's, taken and not needed: gradients are of the shapes of what they are for.

    What is refused on one rank is raised there and, in their next step, as RuntimeError on the others, for which that
    rank waits, up to a minute.
    """

    def __init__(
        self,
        submodule: nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device | str,
        input_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        output_args: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
        *,
        output_grads: Any = None,
        input_grads: Any = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: GetMesh | None = None,
    ):
        if not isinstance(submodule, nn.Module):
            raise TypeError(f"submodule is a {type(submodule).__name__}, expected a torch.nn.Module")
        if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
            raise ValueError(f"num_stages is {num_stages!r}, expected an int of at least 1")
        if isinstance(stage_index, bool) or not isinstance(stage_index, int) or not 0 <= stage_index < num_stages:
            raise ValueError(f"stage_index is {stage_index!r}, expected 0 to {num_stages - 1} (num_stages - 1)")
        if dw_builder is not None and not callable(dw_builder):
            raise TypeError(f"dw_builder is a {type(dw_builder).__name__}, expected a callable")
        if get_mesh is not None and not callable(get_mesh):
            raise TypeError(f"get_mesh is a {type(get_mesh).__name__}, expected a callable")
        self.device = stage_device(device)
        _check_module(submodule, self.device)
        if not dist.is_initialized():
            raise RuntimeError("the process group is not initialized, expected init_process_group() before a stage")
        self.submod = submodule
        self.dw_builder = dw_builder
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.group = dist.group.WORLD if group is None else group
        self.group_rank = dist.get_rank(self.group)
        self.group_size = dist.get_world_size(self.group)
        if self.group_rank < 0:
            raise ValueError("group does not contain this process, expected the pipeline's own group")
        if self.group_size > num_stages:
            raise ValueError(
                f"num_stages is {num_stages}, expected at least {self.group_size}: the group has that many ranks"
            )
        self.declared_inputs = _declared(input_args, "input_args", arrives=stage_index > 0)
        self.declared_outputs = _declared(output_args, "output_args", arrives=stage_index < num_stages - 1)
        self.meshes = Meshes([*_listed(input_args), *_listed(output_args)], get_mesh)
        self.edges: Sequence[Edge] | None = None  # of the traced model that it is a stage of
        self.arguments: TracedArguments | None = None
        self.forward_contexts: Contexts = OrderedDict()

    @classmethod
    def _group_of_arguments(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        group = kwargs.get("group")
        return dist.group.WORLD if group is None and dist.is_initialized() else group

    def register_forward_context(
        self, context_factory: Callable[[PipelineStageInfo], AbstractContextManager[Any]]
    ) -> RemovableHandle:
        """A context manager around each forward, as torch's: ``context_factory(info)`` makes one, which lets errors through.

        Returns:
            What removes it, by ``remove()``.

        Raises:
            RuntimeError: one is registered.
        """
        if self.forward_contexts:
            raise RuntimeError("a forward context is registered, expected it to be removed before another one comes")
        handle = RemovableHandle(self.forward_contexts)
        self.forward_contexts[handle.id] = context_factory
        return handle

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1


def _check_module(submodule: nn.Module, device: torch.device) -> None:
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # whoever uses it has imported it
    for module in submodule.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FullyShardedDataParallel):
            raise NotImplementedError("submodule contains a FullyShardedDataParallel, expected fully_shard (FSDP2)")
    for name, tensor in [*submodule.named_parameters(), *submodule.named_buffers()]:
        if tensor.device != device and not tensor.is_meta:
            raise ValueError(f"{name} of submodule is on {tensor.device}, expected the stage's device {device}")


def _declared(args: Any, name: str, *, arrives: bool) -> Declared | None:
    """What is compared for each microbatch: of what goes between stages the local parts, of what the user has all."""
    if args is None:
        return None
    listed = _listed(args)
    if not all(isinstance(arg, torch.Tensor) for arg in listed):
        raise TypeError(f"{name} is {args!r}, expected a tensor or a tuple of tensors")
    return [(list((local_part(arg) if arrives else arg).shape), arg.dtype) for arg in listed]


def _listed(args: Any) -> list[Any]:
    return [] if args is None else list(args) if isinstance(args, (tuple, list)) else [args]
