"""Norms of gradients over replicas and model-parallel ranks, which count each weight of the whole model once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from farandole.ddp._runs import GradShard, Run
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


def total_norm(
    runs: Sequence[Run | GradShard],
    norm_type: float,
    weight_of: Callable[[Run | GradShard], float],
    left_out: set[torch.Tensor],
    device: torch.device,
) -> torch.Tensor:
    """The norm to the power of norm_type (for infinity the norm itself) of the gradients of these runs.

    But for the parameters that are ``left_out``. ``weight_of`` a run: what part of it this rank counts, for runs that
    several ranks hold.
    """
    is_infinite = norm_type == torch.inf
    total = torch.zeros((), dtype=torch.float64, device=device)
    for run in runs:
        grad = run.tensor.grad
        assert grad is not None
        counted = [grad]
        if any(piece.parameter in left_out for piece in run.pieces):
            counted = [piece.of(grad) for piece in run.pieces if piece.parameter not in left_out]
        for part in counted:
            if part.numel() == 0:
                continue
            norm = torch.linalg.vector_norm(part, norm_type, dtype=torch.promote_types(part.dtype, torch.float32))
            total = torch.maximum(total, norm) if is_infinite else total + norm.double() ** norm_type * weight_of(run)
    return total
