"""Uneven inputs: what a rank that has none left does, so that the others do not wait for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig

from farandole import _C
from farandole.ddp._ignored import named_buffers, named_parameters

if TYPE_CHECKING:
    from farandole.ddp._runs import Run
    from farandole.ddp._wrapper import DistributedDataParallel


@dataclass(frozen=True)
class _Forward:
    """What all ranks know of the forward that some of them begin."""

    active: int
    """Ranks that have inputs."""
    source: int
    """The last of them: whose buffers count."""
    broadcasts: bool
    reduces: bool


def begin_forward(model: DistributedDataParallel, broadcasts: bool, reduces: bool) -> int:
    """Of a rank that has inputs, inside join(): tells the others so. Returns the rank whose buffers count."""
    work = Join.notify_join_context(model)
    told = _tell(model, True, broadcasts, reduces)
    if work is not None:
        work.wait()
    _average(model, told)
    return told.source


class DdpJoinHook(JoinHook):
    """Does in each step of the others what they do, and brings the model up to date at the end."""

    def __init__(self, model: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        self._model = model
        model._divides_by_world = divide_by_initial_world_size

    def main_hook(self) -> None:
        told = _tell(self._model, False, False, False)
        if told.broadcasts:
            self._model._sync_buffers(told.source)
        if told.reduces:
            _average(self._model, told)
            self._model._reducer.shadow_round()
        self._model.require_forward_param_sync = told.reduces

    def post_hook(self, is_last_joiner: bool) -> None:
        model = self._model
        copied = _copied_in(model)
        copies = [run.tensor.detach() for run in copied or ()]
        numel = -1 if copied is None else sum(copy.numel() for copy in copies)
        rank = model.process_group.rank() if is_last_joiner else -1
        told = torch.tensor([rank, numel, -numel], device=model.join_device)
        dist.all_reduce(told, op=dist.ReduceOp.MAX, group=model.process_group)
        source, most, least = (int(number) for number in told.tolist())
        are_alike = most == -least and most >= 0
        state = [parameter for _, parameter in named_parameters(model.module, model.parameters_to_ignore)]
        if model.broadcast_buffers:
            state += [buffer for _, buffer in named_buffers(model.module, model.parameters_to_ignore)]
        if are_alike:
            for run in copied or ():
                run.take_writes()  # the copies that all get are what is written here
            state += copies
        _C.broadcast_tensors(model.process_group, state, source)
        # Nothing shows optimizers that the parameters have changed.
        for run in copied or ():
            run.note_writes()
        for optimizer in () if are_alike else list(model._optimizers):
            optimizer.reload_model_params()
        # All have come here: what is after it needs no telling.
        model._reducer.average_over(model.replicas.size)
        model._join_config = _JoinConfig.construct_disabled_join_config()


def _copied_in(model: DistributedDataParallel) -> list[Run] | None:
    """The runs of optimizers that have float32 copies of the model's parameters, in the order of these; None where two have
    a copy of one parameter."""
    runs = [run for optimizer in model._optimizers for run in optimizer._runs if run.has_master]
    run_of = {run.pieces[0].parameter: run for run in runs}
    if len(run_of) < len(runs):
        return None
    return [run_of[parameter] for parameter in model._trainable.values() if parameter in run_of]


def _tell(model: DistributedDataParallel, is_active: bool, broadcasts: bool, reduces: bool) -> _Forward:
    group = model.process_group
    values = torch.zeros(2 + group.size(), dtype=torch.int32)
    values[0], values[1], values[2 + group.rank()] = broadcasts, reduces, is_active
    values = values.to(model.join_device)
    dist.all_reduce(values, group=group)
    flags = values.tolist()
    active = [rank for rank, is_active in enumerate(flags[2:]) if is_active]
    return _Forward(len(active), max(active, default=0), flags[0] > 0, flags[1] > 0)


def _average(model: DistributedDataParallel, told: _Forward) -> None:
    model._reducer.average_over(model.replicas.size if model._divides_by_world else told.active)


class UnevenInputs(Joinable):
    """The part of the wrapper that ``join`` is."""

    def join(
        self: DistributedDataParallel,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> Join:
        """For a training loop over uneven inputs: a rank that has left it does what the others wait for, until all have.

        As torch's; ``torch.distributed.algorithms.join.Join([model, ...])`` works, too. Each forward with gradients
        must be followed by its backward. At the end all ranks have the model of those that were the last.

        Args:
            divide_by_initial_world_size: gradients are divided by the number of all ranks, else by that of those that
                have inputs.
            enable: False does nothing.
            throw_on_early_termination: when one rank has no more inputs all raise a RuntimeError.
        """
        return Join(
            [self],
            enable,
            throw_on_early_termination,
            divide_by_initial_world_size=divide_by_initial_world_size,
        )

    def join_hook(self: DistributedDataParallel, **kwargs: Any) -> JoinHook:
        """Joinable's: takes ``divide_by_initial_world_size``."""
        if self._options.is_sharded:
            raise RuntimeError(
                "join(): expected use_distributed_optimizer=False, a rank without inputs would not update its part"
            )
        if self.replicas.instances is not None or self.experts.group != self.replicas.group:
            raise RuntimeError(
                "join(): expected one process group, neither instance_process_group nor expert_process_group"
            )
        if self._tuner is not None and self._tuner.is_pending:
            raise RuntimeError("join(): expected a bucket_size in elements, or that 'auto' has chosen one before")
        if not self._options.ends_with_backward:
            raise RuntimeError(
                "join(): expected gradients that are reduced when backward ends, not by finish_grad_sync"
            )
        return DdpJoinHook(self, kwargs.get("divide_by_initial_world_size", True))

    @property
    def join_device(self: DistributedDataParallel) -> torch.device:
        """Joinable's: where the parameters are."""
        return self.device

    @property
    def join_process_group(self: DistributedDataParallel) -> dist.ProcessGroup:
        """Joinable's."""
        return self.process_group
