"""What an optimizer says of its gradients, over all ranks: norms, clipping, zeros."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from farandole.ddp._norms import NormGroups, over_ranks, scale, total_norms, zeros_in
from farandole.ddp._runs import GradShard, Run
from farandole.ddp._wrapper import DistributedDataParallel

_CLIP_EPSILON = 1e-6  # torch.nn.utils.clip_grad_norm_'s


def _is_limit(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool) and float(value) >= 0


def _check_norm_type(norm_type: object) -> None:
    if not _is_limit(norm_type) or norm_type == 0:
        raise ValueError(f"norm_type={norm_type!r}: expected a number above 0, infinity too")


class MeasuresGradients:
    """The part of the optimizer that measures and clips."""

    _models: Sequence[DistributedDataParallel]
    _graded: Sequence[Run | GradShard]
    _is_sharded: bool
    _uncounted: set[torch.Tensor]
    _norm_groups: NormGroups
    _model_parallel_group: dist.ProcessGroup | None
    _take_grads: Callable[[str], None]
    grad_norms_by_group: dict[str, torch.Tensor]

    @torch.no_grad()
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scales all gradients down so that their norm, over all ranks, is at most ``max_norm``; returns the norm.

        The same on all ranks of the data-parallel and the model-parallel groups. A collective of these. As in
        Megatron-core parameters with a ``grad_norm_group`` ("mtp") do not count in it, and are scaled by the norm of
        their group, which ``grad_norms_by_group`` has then.
        """
        if not isinstance(max_norm, torch.Tensor) and not _is_limit(max_norm):
            raise ValueError(f"max_norm={max_norm!r}: expected a number, at least 0")
        _check_norm_type(norm_type)
        self._take_grads("clip_grad_norm_()")
        totals = self._total_norms(float(norm_type))
        if error_if_nonfinite:
            self._norm_groups.check_finite(totals, norm_type)
        scale(self._graded, (max_norm / (totals + _CLIP_EPSILON)).clamp(max=1.0), self._norm_groups)
        self.grad_norms_by_group = dict(zip(self._norm_groups.names, totals[1:], strict=True))
        return totals[0]

    def grad_norm(self, norm_type: float = 2.0) -> torch.Tensor:
        """The norm of the gradients over all ranks, but for those with a ``grad_norm_group``. A collective."""
        _check_norm_type(norm_type)
        with torch.no_grad():
            self._take_grads("grad_norm()")
            return self._total_norms(float(norm_type))[0]

    @torch.no_grad()
    def count_zeros(self) -> int:
        """How many elements of the gradients are zero, over all ranks: Megatron-core's ``log_num_zeros_in_grad``.

        Each weight of the whole model counts once, as in norms, but whatever its ``grad_norm_group``. A collective.
        """
        self._take_grads("count_zeros()")
        first = self._models[0]
        is_first = {False: first.replicas.group.rank() == 0, True: first.experts.group.rank() == 0}
        counted = [run for run in self._graded if self._is_sharded or is_first[run.is_expert]]
        zeros = zeros_in(counted, self._uncounted, self._device)
        return int(over_ranks(zeros, 1.0, [first.replicas.group, self._model_parallel_group]).item())

    @property
    def _device(self) -> torch.device:
        with_parameters = (model for model in self._models if model._trainable)
        return next(with_parameters, self._models[0]).device

    def _total_norms(self, norm_type: float) -> torch.Tensor:
        """By norm group. The weights: a sharded run is this rank's alone, any other is every replica's."""
        first = self._models[0]
        copies = {False: first.replicas.group.size(), True: first.experts.group.size()}
        totals = total_norms(
            self._graded,
            norm_type,
            lambda run: 1.0 if self._is_sharded else 1.0 / copies[run.is_expert],
            self._uncounted,
            self._norm_groups,
            self._device,
        )
        return over_ranks(totals, norm_type, [first.replicas.group, self._model_parallel_group])
