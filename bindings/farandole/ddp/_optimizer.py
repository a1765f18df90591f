"""An optimizer whose state the replicas share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from farandole.ddp import _optimizer_state as saved
from farandole.ddp._agreement import Facts, raising_together
from farandole.ddp._kept_graphs import note_step
from farandole.ddp._measures import MeasuresGradients
from farandole.ddp._model_values import values_of
from farandole.ddp._norms import NormGroups, norm_groups_of, uncounted
from farandole.ddp._other_optimizers import OtherOptimizers
from farandole.ddp._overflow import OverflowFlag
from farandole.ddp._own_steps import step_held
from farandole.ddp._runs import Cut, GradShard, Run, give_back, whole_runs_of
from farandole.ddp._saves_state import SavesState
from farandole.ddp._settings import agree_on_settings, copy_settings, settings_of
from farandole.ddp._stands_for import StandsFor
from farandole.ddp._state_names import expert_suffix, on_all_stages, told_apart, trainable_of
from farandole.ddp._step_parts import StepParts
from farandole.ddp._whole import WholeParameters
from farandole.ddp._wrapped import (
    check_copied,
    check_models,
    check_optimizer,
    facts_of,
    facts_of_groups,
    groups_of,
    is_elementwise_of,
)
from farandole.ddp._wrapper import DistributedDataParallel


class DistributedOptimizer(StandsFor, MeasuresGradients, SavesState, torch.optim.Optimizer):
    """A torch optimizer of whose state each rank keeps its part, as Megatron-core's DistributedOptimizer (ZeRO-1).

    Over a model that is wrapped with ``use_distributed_optimizer=True`` each rank updates its part of every bucket,
    with a float32 copy where parameters have a shorter type, and all get the result by an all-gather. Of optimizers
    that look at whole parameters (Adafactor, Muon) each rank updates some parameters as a whole instead; see
    docs/data_parallel.md for what moves. A model that is wrapped without it is updated by each rank as a whole, with
    the same float32 copies: for ``grad_reduce_in_fp32``.

        model = DistributedDataParallel(module, use_distributed_optimizer=True)
        optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), model)
        for batch in data:
            optimizer.zero_grad()
            loss(model(batch)).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()

    Learning rate schedulers take it as any optimizer, and so does ``torch.amp.GradScaler``: an overflow that one rank
    sees skips the step of all, of ``model_parallel_group`` too, and leaves them with one scale. ``unscale_()`` and
    ``step()`` of the scaler are collectives then. With float16 gradients an optimizer that needs whole parameters is
    refused there: ``grad_reduce_in_fp32=True``.

    Constructing is a collective: what is wrong on one rank is raised on all.

    Args:
        optimizer: made over parameters of the model, in any param groups. It is taken over with the state it has: its
            ``param_groups`` get the tensors that this rank updates, flat ones where the model is sharded and it updates
            each element by itself, as Adam or SGD do. Else it must update each parameter by itself. Those of the
            DistributedOptimizer show what this rank has of the gradients, for scalers.
        model: the wrapped model, or several (virtual stages). Parameters that ``optimizer`` has not stay as they are.
        model_parallel_group: ranks with other parameters of the same model (pipeline and tensor parallel ones),
            over which norms of gradients are added up, too. Of what several of them have, one counts: a parameter with
            ``shared = True`` is left out, and of those with ``shared_embedding = True`` all but the first rank's.
        tensor_parallel_group: the tensor-parallel ranks among these. On all but the first of them parameters that have
            no ``tensor_model_parallel = True`` are left out of norms, experts excepted.
        is_elementwise: whether a custom optimizer updates each element by itself, or each parameter: must be said
            where that is not known.
        overlap_param_gather_with_optimizer_step: ``optimizer`` steps once for each bucket, first layers first, and the
            all-gather of each starts before the next is stepped.

    Raises:
        ValueError: an optimizer that can do neither over a sharded model; a parameter that is of none of the models;
            embeddings that may be parts or copies of each other.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: DistributedDataParallel | Sequence[DistributedDataParallel],
        *,
        model_parallel_group: dist.ProcessGroup | None = None,
        tensor_parallel_group: dist.ProcessGroup | None = None,
        is_elementwise: bool | None = None,
        overlap_param_gather_with_optimizer_step: bool = False,
    ) -> None:
        is_one = isinstance(model, torch.nn.Module) or not isinstance(model, Iterable)
        given: list[Any] = [model] if is_one else list(model)
        models = self._models = [one for one in given if isinstance(one, DistributedDataParallel)]
        if not models:  # nor a group whose ranks could be told
            check_models(given)
        self._is_sharded = any(one._param_sync is not None for one in models)
        self._inner = optimizer
        self._model_parallel_group = None
        with self._raising_together() as facts:  # before a group that others may not have
            facts += facts_of_groups(
                model_parallel_group=model_parallel_group, tensor_parallel_group=tensor_parallel_group
            )
        self._model_parallel_group = model_parallel_group
        with self._raising_together() as facts:
            check_models(given)
            check_optimizer(optimizer)
            is_flat = not self._is_sharded or is_elementwise_of(optimizer, is_elementwise)
            if overlap_param_gather_with_optimizer_step and not (self._is_sharded and is_flat):
                needed = (
                    "an optimizer that updates each element by itself"
                    if self._is_sharded
                    else "a model that is wrapped with use_distributed_optimizer=True"
                )
                raise ValueError(f"overlap_param_gather_with_optimizer_step=True: expected {needed}")
            prefixes = ["" if len(models) == 1 else f"{index}." for index in range(len(models))]
            group_of, self._names = groups_of(optimizer, models, prefixes)
            check_copied(models, group_of)
            norm_group_of = norm_groups_of(models)
            facts += facts_of(optimizer, self._names)
            facts += [("parameters' grad_norm_group", ", ".join(sorted(set(norm_group_of.values()))))]
            facts += [("is_elementwise", str(is_flat))]
        self._expert_suffix = expert_suffix(models)
        self._uncounted = uncounted(models, model_parallel_group, tensor_parallel_group)
        self._norm_groups = NormGroups(norm_group_of, model_parallel_group)
        self.grad_norms_by_group: dict[str, torch.Tensor] = {}
        named = [trainable_of(one, prefix, self._expert_suffix) for one, prefix in zip(models, prefixes, strict=True)]
        named = told_apart(named, self._model_parallel_group)
        self._names = on_all_stages(self._names, self._model_parallel_group)
        cuts = [Cut(one, parameters, group_of) for one, parameters in zip(models, named, strict=True)]
        self._exchanges: list[WholeParameters] = []
        self._has_float16_grads = any(
            parameter.main_grad.dtype == torch.float16 for parameter in group_of if hasattr(parameter, "main_grad")
        )
        if is_flat:
            self._runs = [run for cut in cuts for run in cut.runs()]
        else:
            self._runs, self._exchanges = whole_runs_of(cuts)
        self._has_stepped = bool(optimizer.state)  # what is saved of it is more than room for what is loaded
        with self._raising_together():
            saved.check_counts(optimizer, self._runs)
        saved.take_over(optimizer, self._runs)
        self._stepped = list(group_of)
        self._others = OtherOptimizers(self, models, group_of)
        for one in models:
            one._reducer.hold_parameters()  # the runs have their memory
            one._optimizers.add(self)
        for index, group in enumerate(optimizer.param_groups):
            group["params"] = [run.tensor for run in self._runs if run.group == index]
        self._parts = StepParts(optimizer, self._runs, models) if overlap_param_gather_with_optimizer_step else None
        # What is measured, clipped and scaled.
        self._graded: Sequence[Run | GradShard] = self._runs
        if not is_flat:
            self._graded = [shard for cut in cuts for shard in cut.shards()]
        self._is_provisional = False  # the state was made to be loaded into, and was not
        self._begun = [-1] * len(models)  # the rounds, by model, at the last zero_grad()
        self._taken: list[int] | None = None  # the rounds, by model, whose gradients the runs have
        super().__init__([dict(group) for group in optimizer.param_groups], optimizer.defaults)
        for index, group in enumerate(self.param_groups):
            group["params"] = [one.tensor for one in self._graded if one.group == index and one.is_seen_by_scalers]
        self._flag = OverflowFlag(self._device, [*self._replica_groups, model_parallel_group], self._unscale_rest)
        self.param_groups[-1]["params"].append(self._flag)
        self._settings = settings_of(self.param_groups)
        self._begin_its_steps()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: what each rank updates was settled when this was made."""
        if hasattr(self, "_settings"):  # else torch's constructor adds those that there are
            raise NotImplementedError(
                "add_param_group(): expected all param groups in the optimizer that a DistributedOptimizer is made of: "
                "make a second one over the same model"
            )
        super().add_param_group(param_group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Begins a step: gradients of the last one do not count any more, but those of other optimizers' parameters.

        With ``set_to_none`` the next gradient of each parameter replaces what ``main_grad`` holds, which spares a pass
        over the buffers; else they are zeroed (``zero_grad_buffer``).
        """
        self._drop_grads()
        for model in self._models:
            model._begin_grads(self._others.left_to_this(model), set_to_none)
        self._begun = [model._reducer.rounds() for model in self._models]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates this rank's part, and brings all ranks' parts together: a collective.

        Raises:
            RuntimeError: gradients were not reduced: there was no backward, or it was inside of no_sync. Or another one
                has updated parameters since of which this one has float32 copies.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_grads("step()")
        self._others.check()
        self._finish_params()  # what is under way reads what changes now
        if self._is_provisional:
            self._inner.state.clear()
            self._is_provisional = False
        for exchange in self._exchanges:
            exchange.gather_grads()
        for run in self._runs if self._exchanges else ():
            run.take_grad()
        for run in self._runs:
            run.take_writes()
            run.hold_frozen(self._inner.state)
        self._agree_on_settings()
        try:
            if self._parts is not None:
                self._parts.step()
            else:
                step_held(self._inner)
        finally:
            for run in self._runs:
                run.release_frozen()
        note_step(self._stepped)
        self._has_stepped = True
        self._show_settings()
        self._drop_grads()
        if self._parts is None:
            self._publish()
        else:
            self._others.are_outdated()
            self._note_writes()
        return loss

    def reload_model_params(self, state_dict: dict[str, Any] | None = None) -> None:
        """Takes float32 copies from the model anew, after its parameters were loaded.

        Args:
            state_dict: what to take them from instead, where it has more digits than the model: that of the module, or of
                several ``{"model0": ..., "model1": ...}``. Names may have more before them, tensors of another type.

        Raises:
            ValueError: it lacks a parameter, or has it in another shape. Then nothing has changed.
        """
        self._finish_params()
        values = None
        if state_dict is not None:
            values = values_of(
                self._models, state_dict, {piece.parameter for run in self._runs for piece in run.pieces}
            )
        for run in self._runs:
            run.reload(values)
        self._note_writes()
        self._others.is_reloaded()

    def _finish_params(self) -> None:
        for model in self._models:
            if model._param_sync is not None:
                model._param_sync.finish()

    def _publish(self) -> None:
        self._others.are_outdated()
        with torch.no_grad():
            for run in self._runs:
                run.publish()
            for exchange in self._exchanges:
                exchange.scatter_parameters()
        for model in self._models:
            if model._param_sync is not None:
                model._param_sync.updated()
        self._note_writes()

    def _note_writes(self) -> None:
        for run in self._runs:
            run.note_writes()

    @property
    def _replica_groups(self) -> list[dist.ProcessGroup | None]:
        return [group for model in self._models for group in (model.replicas.group, model.replicas.instances)]

    def _raising_together(self) -> contextlib.AbstractContextManager[Facts]:
        return raising_together(self._replica_groups, [self._model_parallel_group], self._device)

    def _agree_on_settings(self) -> None:
        agree_on_settings(self.param_groups, self._inner.param_groups, self._settings)
        self._settings = settings_of(self.param_groups)

    def _show_settings(self) -> None:
        copy_settings(self._inner.param_groups, self.param_groups)
        self._settings = settings_of(self.param_groups)

    def _take_grads(self, what: str) -> None:
        rounds = [model._reducer.rounds() for model in self._models]
        for model, round_, begun in zip(self._models, rounds, self._begun, strict=True):
            if not model._reducer.is_reduced() or round_ == begun:
                reason = model._reducer.overrun() or (
                    "gradients were not reduced: expected a backward outside of no_sync(), or finish_grad_sync(), since "
                    "the last zero_grad()"
                )
                raise RuntimeError(f"{what}: {reason}")
        # Not whether there was a zero_grad() since: that of the model's buffers does as well.
        is_new = self._taken != rounds
        for run in () if self._exchanges else self._runs:
            run.take_grad(is_new)
        self._taken = rounds

    def _drop_grads(self) -> None:
        self._taken = None
        for run in self._runs:
            run.drop_grad()
        self._flag.raise_again()

    def _scale_copies(self, model: DistributedDataParallel, factor: float | torch.Tensor) -> None:
        """The model has multiplied its gradients."""
        if self._taken is None or self._exchanges:
            return
        parameters = set(model._trainable.values())
        for run in self._runs:
            if run.pieces[0].parameter in parameters:
                run.scale_copy(factor)

    def _unscale_rest(self, found_inf: torch.Tensor, inv_scale: torch.Tensor) -> None:
        """A scaler has come to the last gradient that it sees: copies of another type are made now."""
        self._take_grads("GradScaler.unscale_()")
        by_type: dict[torch.dtype, list[torch.Tensor]] = {}
        for one in self._graded:
            if not one.has_view and one.tensor.grad is not None:
                by_type.setdefault(one.tensor.grad.dtype, []).append(one.tensor.grad)
        if self._exchanges and self._has_float16_grads:
            raise ValueError(
                f"GradScaler.unscale_(): gradients are float16, and {type(self._inner).__name__} needs them whole, in "
                "their own type, too short for unscaled ones: expected grad_reduce_in_fp32=True"
            )
        for grads in by_type.values():
            torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inv_scale)
        give_back(self._graded)
