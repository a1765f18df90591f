"""This rank's part of a model, cut into the tensors that its optimizer updates."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from farandole import _C
from farandole.ddp._wrapper import DistributedDataParallel

_MASTERED = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Piece:
    """A part of one parameter, flattened."""

    name: str
    parameter: torch.Tensor
    begin: int  # elements: where it lies in the parameter
    numel: int
    offset: int  # elements: where it lies in the run

    def of(self, run_tensor: torch.Tensor) -> torch.Tensor:
        """Its elements of a tensor that has one for each element of the run: a view, flat."""
        return run_tensor.view(-1)[self.offset : self.offset + self.numel]


class Run:
    """What the optimizer updates as one tensor.

    Where the model is sharded, it is flat: neighbours in this rank's part of a bucket that share a param group, with
    the padding between them, which stays zero. Else it is one parameter, as it is. ``tensor`` is the parameters
    themselves, or a float32 copy where they have a shorter type.
    """

    def __init__(
        self, group: int, pieces: list[Piece], data: torch.Tensor, grads: torch.Tensor, is_expert: bool
    ) -> None:
        self.group = group
        self.pieces = pieces
        self.is_expert = is_expert
        self._data = data
        self._grads = grads
        self.has_master = data.dtype in _MASTERED
        master = data.detach().to(torch.float32).contiguous() if self.has_master else data.detach()
        self.tensor = torch.nn.Parameter(master)
        self._take_by_view = grads.dtype == self.tensor.dtype
        if self._take_by_view:
            self.tensor.grad = grads

    def take_grad(self) -> None:
        """Gives the optimizer the reduced gradients: a view of them where the type is its own, else a copy."""
        self.tensor.grad = self._grads if self._take_by_view else self._grads.to(self.tensor.dtype)

    def drop_grad(self) -> None:
        """Releases a copy."""
        if not self._take_by_view:
            self.tensor.grad = None

    def publish(self) -> None:
        """Brings what the optimizer has made of the float32 copy to the model."""
        if self.has_master:
            self._data.copy_(self.tensor.detach())

    def reload(self) -> None:
        """Takes the float32 copy from the model anew."""
        if self.has_master:
            self.tensor.detach().copy_(self._data)


def runs_of(model: DistributedDataParallel, prefix: str, group_of: dict[torch.Tensor, int]) -> list[Run]:
    """The runs of the parameters that are in a param group. ``prefix`` goes before their names."""
    trainable = [(prefix + name, model._trainable[name]) for name, _ in model._reducer.main_grads()]
    runs: list[Run] = []
    for bucket in model._reducer.buckets():
        if bucket.parameters is None:
            runs += _whole_runs(bucket, trainable, group_of)
        else:
            replicas = model.experts if bucket.is_expert else model.replicas
            runs += _flat_runs(bucket, bucket.parameters, trainable, group_of, replicas.group)
    return runs


def _whole_runs(
    bucket: _C.GradientBucket, trainable: list[tuple[str, torch.Tensor]], group_of: dict[torch.Tensor, int]
) -> Iterator[Run]:
    for index, _, numel in bucket.slots:
        name, parameter = trainable[index]
        if parameter in group_of:
            piece = Piece(name, parameter, 0, numel, 0)
            yield Run(group_of[parameter], [piece], parameter.data, parameter.main_grad, bucket.is_expert)


def _flat_runs(
    bucket: _C.GradientBucket,
    data: torch.Tensor,
    trainable: list[tuple[str, torch.Tensor]],
    group_of: dict[torch.Tensor, int],
    group: dist.ProcessGroup,
) -> Iterator[Run]:
    size = bucket.grads.numel() // group.size()
    begin, end = group.rank() * size, (group.rank() + 1) * size
    mine = [
        (index, offset, max(offset, begin), min(offset + numel, end))
        for index, offset, numel in sorted(bucket.slots, key=lambda slot: slot[1])
        if max(offset, begin) < min(offset + numel, end)
    ]
    for wanted, slots in itertools.groupby(mine, key=lambda slot: group_of.get(trainable[slot[0]][1])):
        if wanted is None:
            continue
        parts = list(slots)
        first, last = parts[0][2], parts[-1][3]
        pieces = [Piece(*trainable[i], begin - offset, end - begin, begin - first) for i, offset, begin, end in parts]
        yield Run(
            wanted, pieces, data[first:last].view(pieces[0].parameter.dtype), bucket.grads[first:last], bucket.is_expert
        )


def total_norm(
    runs: list[Run], norm_type: float, weight_of: Callable[[Run], float], device: torch.device
) -> torch.Tensor:
    """The norm to the power of norm_type (for infinity the norm itself) of the gradients of these runs.

    A parameter with ``shared = True`` (Megatron's mark of one that another stage counts) is left out. ``weight_of``
    a run: what part of it this rank counts, for runs that several ranks hold.
    """
    is_infinite = norm_type == torch.inf
    total = torch.zeros((), dtype=torch.float64, device=device)
    for run in runs:
        grad = run.tensor.grad
        assert grad is not None
        counted = [grad]
        if any(getattr(piece.parameter, "shared", False) for piece in run.pieces):
            counted = [piece.of(grad) for piece in run.pieces if not getattr(piece.parameter, "shared", False)]
        for part in counted:
            if part.numel() == 0:
                continue
            norm = torch.linalg.vector_norm(part, norm_type, dtype=torch.promote_types(part.dtype, torch.float32))
            total = torch.maximum(total, norm) if is_infinite else total + norm.double() ** norm_type * weight_of(run)
    return total
