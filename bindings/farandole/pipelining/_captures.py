"""Steps that are captured in a CUDA graph: what of them it would not replay is refused."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def is_captured(device: torch.device) -> bool:
    """Whether what a stage there computes now becomes part of a graph."""
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


def check_capturable(*, checks_for_nan: bool, wrapped: Iterable[str], over_ucx: bool) -> None:
    """
    Args:
        checks_for_nan: the step looks at its numbers.
        wrapped: names of the stages whose gradients are reduced between replicas.
        over_ucx: messages of tensors there go by UCX.

    Raises:
        NotImplementedError: such a step cannot be captured.
    """
    if checks_for_nan:
        raise NotImplementedError(
            "check_for_nan_in_loss_and_grad is True in a step that is captured in a CUDA graph, expected False: the host "
            "would have to see the numbers"
        )
    for name in wrapped:
        raise NotImplementedError(
            f"{name} is wrapped for data parallelism in a step that is captured in a CUDA graph, expected a plain module: "
            "replicas agree on the CPU in each step"
        )
    if over_ucx:
        raise NotImplementedError(
            "FARANDOLE_CUDA_MESSAGES is 'ucx' in a step that is captured in a CUDA graph, expected 'nccl': UCX's messages "
            "cannot be captured"
        )
