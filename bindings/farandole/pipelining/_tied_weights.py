"""Weights that several stages use, as an embedding and the output layer do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class TiedWeights:
    """Parameters of which several ranks hold a copy: equal from the beginning, and kept so by summed gradients.

        tied = TiedWeights([embedding.weight], group)   # on the ranks of the first and of the last stage
        ...
        schedule.step(...)
        tied.sum_gradients()
        optimizer.step()

    Where both stages are on one rank (ZBV, V-Half, V-Min, DualPipeV with the first and the last one) the modules share
    the parameter itself, and there is nothing to do. With replicas, each pipeline has a group of its own, and gradients
    are summed after they were averaged.

    Constructing is a collective of the group: shapes and dtypes are compared, and the values of one rank taken.

    Args:
        parameters: in the same order on all ranks of the group.
        group: the ranks that hold a copy.
        source: whose values all take, as a rank of the group.

    Raises:
        ValueError: the ranks bring different parameters (on all of them), or ``source`` is none of theirs.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], group: dist.ProcessGroup, source: int = 0):
        if not 0 <= source < group.size():
            raise ValueError(f"source is {source}, expected a rank of the group: 0 to {group.size() - 1}")
        self._parameters = list(parameters)
        self._group = group
        _compare(self._parameters, group)
        for parameter in self._parameters:
            dist.broadcast(parameter.data, dist.get_global_rank(group, source), group=group)
        self._flat: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
        self._places: list[str] | None = None  # where gradients are, which all ranks have agreed on
        self._alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}  # their parameters, from then on

    def sum_gradients(self) -> None:
        """Makes each gradient the sum over the group; a collective, once before each step of the optimizer.

        Gradients are ``.grad``, or ``main_grad`` where a wrapper for data parallelism keeps them there. A parameter
        without one counts as zeros, and has one after it.

        Raises:
            ValueError: the copies of a parameter have theirs in different places, or one has a part of it alone
                (``use_distributed_optimizer``), on all ranks.
            RuntimeError: on a rank gradients have moved to other places since the first call; on all ranks, of
                parameters on the CPU. Elsewhere the others, which do not wait for it, get NaN.
        """
        if self._places is None:
            self._places = self._agree()
            self._alike = self._sorted()
        places = [_place_of(parameter) for parameter in self._parameters]
        have_moved = places != self._places
        for (dtype, device), parameters in self._alike.items():
            *parts, moved = self._split(dtype, device, parameters)
            moved.fill_(have_moved)
            for parameter, part in zip(parameters, parts, strict=True):
                grad = None if have_moved else _grad_of(parameter)
                part.zero_() if grad is None else part.copy_(_dense(grad).reshape(-1))
            dist.all_reduce(self._flat[dtype, device], group=self._group)
            if have_moved and device.type == "cpu":
                break
            if have_moved:  # the others, who do not look, come to the next one
                continue
            if device.type != "cpu":  # to look would wait for it: the sum of others becomes none
                self._flat[dtype, device].add_(torch.where(moved == 0, 0.0, torch.nan))
            elif moved.item() != 0:
                raise RuntimeError(f"gradients of another rank are not in {self._places} as in the first call")
            for parameter, part in zip(parameters, parts, strict=True):
                grad = _grad_of(parameter)
                if grad is None or grad.layout != torch.strided:
                    grad = parameter.grad = torch.empty_like(parameter)
                grad.copy_(part.view(parameter.shape))
        if have_moved:
            raise RuntimeError(f"gradients are in {places}, expected {self._places} as in the first call")

    def _split(
        self, dtype: torch.dtype, device: torch.device, parameters: list[nn.Parameter]
    ) -> Sequence[torch.Tensor]:
        """A part for each of them, and an element that tells whether theirs have moved."""
        sizes = [*(parameter.numel() for parameter in parameters), 1]
        if (dtype, device) not in self._flat:
            self._flat[dtype, device] = torch.empty(sum(sizes), dtype=dtype, device=device)
        return self._flat[dtype, device].split(sizes)

    def _sorted(self) -> dict[tuple[torch.dtype, torch.device], list[nn.Parameter]]:
        alike: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
        for parameter in self._parameters:
            grad = _grad_of(parameter)
            alike.setdefault((parameter.dtype if grad is None else grad.dtype, parameter.device), []).append(parameter)
        return alike

    def _agree(self) -> list[str]:
        """On the first call: later ones find the gradients where they were."""
        places = [_place_of(parameter) for parameter in self._parameters]
        all_of: list[Any] = [None] * self._group.size()
        dist.all_gather_object(all_of, places, group=self._group)
        for rank, theirs in enumerate(all_of):
            if theirs != all_of[0] or "part of main_grad" in theirs:
                raise ValueError(
                    f"gradients of rank {rank} of the group are in {theirs}, of rank 0 in {all_of[0]}: expected whole "
                    "ones, in the same places on all ranks"
                )
        return places


def _grad_of(parameter: nn.Parameter) -> torch.Tensor | None:
    return parameter.grad if _place_of(parameter) == "grad" else parameter.main_grad


def _place_of(parameter: nn.Parameter) -> str:
    """As farandole's wrapper says; Megatron-core's has it in main_grad."""
    place: str = getattr(parameter, "main_grad_place", "main_grad" if hasattr(parameter, "main_grad") else "grad")
    return place


def _dense(grad: torch.Tensor) -> torch.Tensor:
    return grad if grad.layout == torch.strided else grad.to_dense()


def _compare(parameters: list[nn.Parameter], group: dist.ProcessGroup) -> None:
    mine = [(tuple(parameter.shape), str(parameter.dtype)) for parameter in parameters]
    all_of: list[Any] = [None] * group.size()
    dist.all_gather_object(all_of, mine, group=group)
    for rank, theirs in enumerate(all_of):
        if theirs != all_of[0]:
            raise ValueError(f"parameters of rank {rank} of the group are {theirs}, expected {all_of[0]} as on rank 0")
