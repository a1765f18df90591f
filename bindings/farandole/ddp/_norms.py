"""Norms of gradients over replicas and model-parallel ranks, which count each weight of the whole model once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
import torch.distributed as dist

from farandole.ddp._lone_calls import named
from farandole.ddp._runs import GradShard, Run, give_back
from farandole.ddp._wrapper import DistributedDataParallel

# What tells embeddings that stages share from others: their tensor-parallel rank, their shape, and which one of this
# shape it is in its chunk. The rank is None where each has another part of it, but the group of these is not known.
_Key = tuple[int | None, tuple[int, ...], int]


def uncounted(
    models: Sequence[DistributedDataParallel],
    model_parallel_group: dist.ProcessGroup | None,
    tensor_parallel_group: dist.ProcessGroup | None,
) -> set[torch.Tensor]:
    """The parameters that another rank, or another chunk of this one, counts. A collective of ``model_parallel_group``.

    As in Megatron-core those with ``shared = True``, and on tensor-parallel ranks but the first all that have no
    ``tensor_model_parallel = True``, experts excepted. Of those with ``shared_embedding = True`` the first rank has
    the one that counts.
    """
    tensor_rank = 0 if tensor_parallel_group is None else tensor_parallel_group.rank()
    left_out: set[torch.Tensor] = set()
    tied: list[tuple[_Key, torch.Tensor]] = []
    for model in models:
        seen: Counter[tuple[int, ...]] = Counter()
        for parameter in model._trainable.values():
            is_split = getattr(parameter, "tensor_model_parallel", False)
            is_copy = tensor_rank > 0 and not is_split and getattr(parameter, "allreduce", True)
            if is_copy or getattr(parameter, "shared", False):
                left_out.add(parameter)
            elif getattr(parameter, "shared_embedding", False):
                shape = tuple(parameter.shape)
                rank = None if is_split and tensor_parallel_group is None else tensor_rank
                tied.append(((rank, shape, seen[shape]), parameter))
                seen[shape] += 1
    counted = _counted_before([key for key, _ in tied], model_parallel_group)
    for key, parameter in tied:
        if key in counted:
            left_out.add(parameter)
        counted.add(key)
    return left_out


def _counted_before(mine: list[_Key], group: dist.ProcessGroup | None) -> set[_Key]:
    """By the ranks of the group that come before this one."""
    if group is None or group.size() == 1:
        return set()
    ranks: list[list[_Key]] = [[] for _ in range(group.size())]
    dist.all_gather_object(ranks, mine, group=group)
    for key, count in Counter(key for keys in ranks for key in keys).items():
        if key[0] is None and count > 1:
            raise ValueError(
                f"{count} ranks or chunks have an embedding of shape {key[1]} with shared_embedding=True and "
                "tensor_model_parallel=True, and none has shared=True: expected tensor_parallel_group, which tells "
                "copies from parts"
            )
    return {key for keys in ranks[: group.rank()] for key in keys}


def norm_groups_of(models: Sequence[DistributedDataParallel]) -> dict[torch.Tensor, str]:
    """The parameters with a ``grad_norm_group``, Megatron-core's mark of those whose norm is one of its own."""
    return {
        parameter: str(group)
        for model in models
        for parameter in model._trainable.values()
        if (group := getattr(parameter, "grad_norm_group", None)) is not None
    }


class NormGroups:
    """The norms that there are: that of all parameters that are in no group, and one for each group.

    Making it is a collective of ``model_parallel_group``. Replicas must have the same groups.
    """

    def __init__(self, group_of: dict[torch.Tensor, str], model_parallel_group: dist.ProcessGroup | None) -> None:
        mine = sorted(set(group_of.values()))
        ranks = [mine]
        if model_parallel_group is not None and model_parallel_group.size() > 1:
            ranks = [[] for _ in range(model_parallel_group.size())]
            dist.all_gather_object(ranks, mine, group=model_parallel_group)
        self.names = sorted({name for names in ranks for name in names})
        self._index_of = {parameter: 1 + self.names.index(name) for parameter, name in group_of.items()}

    def parts(
        self, runs: Sequence[Run | GradShard], left_out: Collection[torch.Tensor] = ()
    ) -> Iterator[tuple[int, torch.Tensor, Run | GradShard]]:
        """Gradients of these runs, by norm: 0, or 1 + that of its name in ``names``. But for what is ``left_out``."""
        for run in runs:
            grad = run.tensor.grad
            if grad is None:
                continue
            indices = [
                None if piece.parameter in left_out else self._index_of.get(piece.parameter, 0) for piece in run.pieces
            ]
            if len(set(indices)) == 1:
                parts = [(indices[0], grad)]
            else:
                parts = [(index, piece.of(grad)) for index, piece in zip(indices, run.pieces, strict=True)]
            yield from ((index, part, run) for index, part in parts if index is not None)

    def check_finite(self, totals: torch.Tensor, norm_type: float) -> None:
        for name, total in zip((None, *self.names), totals.tolist(), strict=True):
            if not math.isfinite(total):
                which = "" if name is None else f" with grad_norm_group '{name}'"
                raise RuntimeError(
                    f"the norm of the gradients{which}, of order {norm_type}, is {total}: expected a finite one"
                )


def total_norms(
    runs: Sequence[Run | GradShard],
    norm_type: float,
    weight_of: Callable[[Run | GradShard], float],
    left_out: set[torch.Tensor],
    groups: NormGroups,
    device: torch.device,
) -> torch.Tensor:
    """The norms to the power of norm_type (for infinity the norms themselves) of the gradients of these runs.

    But for the parameters that are ``left_out``. ``weight_of`` a run: what part of it this rank counts, for runs that
    several ranks hold.
    """
    is_infinite = norm_type == torch.inf
    totals = [torch.zeros((), dtype=torch.float64, device=device) for _ in range(1 + len(groups.names))]
    for index, part, run in groups.parts(runs, left_out):
        if part.numel() == 0:
            continue
        norm = torch.linalg.vector_norm(part, norm_type, dtype=torch.promote_types(part.dtype, torch.float32)).double()
        total = totals[index]
        totals[index] = torch.maximum(total, norm) if is_infinite else total + norm**norm_type * weight_of(run)
    return torch.stack(totals)


def zeros_in(runs: Sequence[Run | GradShard], left_out: Collection[torch.Tensor], device: torch.device) -> torch.Tensor:
    """How many elements of the gradients of these runs are zero, but for the parameters that are ``left_out``."""
    zeros = torch.zeros((), dtype=torch.float64, device=device)
    for run in runs:
        grad = run.tensor.grad
        for piece in () if grad is None else run.pieces:  # not what pads them
            if piece.parameter not in left_out:
                zeros += piece.numel - torch.count_nonzero(piece.of(grad))
    return zeros


def over_ranks(totals: torch.Tensor, norm_type: float, groups: Sequence[dist.ProcessGroup | None]) -> torch.Tensor:
    """The norms of all ranks together, from what each has by ``total_norms``: a collective of each of these groups."""
    op = dist.ReduceOp.MAX if norm_type == torch.inf else dist.ReduceOp.SUM
    with named(
        "clip_grad_norm_(), grad_norm() and count_zeros() are collectives: expected the call on all ranks, of "
        "model_parallel_group too, at the same place in their step"
    ):
        for group in groups:
            if group is not None and group.size() > 1:
                dist.all_reduce(totals, op, group=group)
    return totals if norm_type == torch.inf else totals ** (1.0 / norm_type)


def scale(runs: Sequence[Run | GradShard], factors: torch.Tensor, groups: NormGroups) -> None:
    """Multiplies the gradients of each norm by its factor."""
    grads: dict[int, list[torch.Tensor]] = {}
    for index, part, _ in groups.parts(runs):
        grads.setdefault(index, []).append(part)
    for index, parts in grads.items():
        torch._foreach_mul_(parts, factors[index])
    give_back(runs)
    # No gradient ever overwrites what pads them, where zero times NaN would stay. A device is not asked: it would be
    # waited for.
    padding = [gap for run in runs for gap in run.padding]
    if padding and (factors.is_cuda or not factors.isfinite().all()):
        torch._foreach_zero_(padding)
