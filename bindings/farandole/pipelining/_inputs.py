"""What a rank brings to one step: checked, split into microbatches, described by its shapes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from farandole._parameters import parameters_unread
from farandole.pipelining._microbatches import signature, split_inputs, split_target
from farandole.pipelining._stage import Declared, PipelineStage


@dataclass
class Batch:
    """What the caller of a step gave: a whole batch, or its microbatches."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    loss_kwargs: dict[str, Any] | None
    arg_mbs: list[tuple[Any, ...]] | None
    kwarg_mbs: list[dict[str, Any]] | None
    target_mbs: list[Any] | None


@dataclass
class Inputs:
    """The microbatches of one step, and the lists that its results go to."""

    args: list[tuple[Any, ...]]
    kwargs: list[dict[str, Any]] | None
    targets: list[Any] | None
    loss_kwargs: dict[str, Any] | None
    signature: list[Any]
    outputs: list[Any] | None = None
    losses: list[Any] | None = None


@dataclass(frozen=True)
class InputSplitter:
    """Makes the inputs of the steps of a rank's stages; raises ValueError or TypeError for what does not fit."""

    stages: list[PipelineStage]
    first_stages: list[PipelineStage]  # of those, the ones that take the step's arguments
    has_last: bool  # one of them takes the targets
    n_microbatches: int
    args_chunk_spec: tuple[Any, ...] | None
    kwargs_chunk_spec: dict[str, Any] | None

    def prepare(self, batch: Batch) -> Inputs:
        if any(given is not None for given in (batch.arg_mbs, batch.kwarg_mbs, batch.target_mbs)):
            inputs = self._take_microbatches(batch)
        else:
            inputs = self._split(batch)
        if not self.has_last:
            inputs.targets = None
        for stage in self.stages:
            # What is frozen or trained decides which tensors have a gradient, and types which they are of.
            kind = stage.device.type
            autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
            parameters = [(p.requires_grad, p.dtype) for p in parameters_unread(stage.submod)]
            inputs.signature.append((stage.submod.training, autocast, parameters))
        for stage in self.first_stages:
            if stage.declared_inputs is not None:
                _check_declared(inputs.args, stage.declared_inputs)
        return inputs

    def _take_microbatches(self, batch: Batch) -> Inputs:
        count = self.n_microbatches
        if batch.args or batch.kwargs or batch.target is not None:
            raise ValueError("arg_mbs, kwarg_mbs or target_mbs was given beside a whole batch, expected only one")
        _check_pre_split(batch.arg_mbs, "arg_mbs", count, tuple)
        _check_pre_split(batch.kwarg_mbs, "kwarg_mbs", count, dict)
        _check_pre_split(batch.target_mbs, "target_mbs", count, object)
        arg_mbs = [()] * count if batch.arg_mbs is None else batch.arg_mbs
        described = signature(arg_mbs if self.first_stages else None, batch.kwarg_mbs)
        return Inputs(arg_mbs, batch.kwarg_mbs, batch.target_mbs, batch.loss_kwargs, described)

    def _split(self, batch: Batch) -> Inputs:
        count = self.n_microbatches
        args = batch.args if self.first_stages else ()
        args_spec = self.args_chunk_spec if self.first_stages else None
        arg_mbs, kwarg_mbs = split_inputs(args, batch.kwargs, count, args_spec, self.kwargs_chunk_spec)
        targets = None
        if batch.target is not None and self.has_last:
            if not isinstance(batch.target, torch.Tensor):
                raise TypeError(
                    f"target is a {type(batch.target).__name__}, expected a tensor (or target_mbs, one per microbatch)"
                )
            targets = split_target(batch.target, count)
        return Inputs(arg_mbs, kwarg_mbs, targets, batch.loss_kwargs, signature(args, batch.kwargs))


def _check_pre_split(entries: Any, name: str, count: int, kind: type) -> None:
    if entries is None:
        return
    if not isinstance(entries, list) or len(entries) != count:
        length = f" of {len(entries)}" if isinstance(entries, (list, tuple)) else ""
        raise ValueError(f"{name} is a {type(entries).__name__}{length}, expected a list of n_microbatches={count}")
    for index, entry in enumerate(entries):
        if not isinstance(entry, kind):
            raise TypeError(f"{name}[{index}] is a {type(entry).__name__}, expected a {kind.__name__}")


def _check_declared(arg_mbs: list[tuple[Any, ...]], declared: Declared) -> None:
    for microbatch, args in enumerate(arg_mbs):
        actual = [(list(arg.shape), arg.dtype) for arg in args if isinstance(arg, torch.Tensor)]
        if actual != declared:
            raise ValueError(
                f"microbatch {microbatch} has inputs {actual}, expected as declared in input_args {declared}"
            )
