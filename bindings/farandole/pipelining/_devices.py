"""Where stages live, and how messages between them match there."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed as dist


def stage_device(device: torch.device | str) -> torch.device:
    """The device of a stage, with its index.

    Raises:
        NotImplementedError: it is neither the CPU nor a GPU of CUDA.
        ValueError: there is no such GPU.
    """
    where = torch.device(device)
    if where.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"device is {where}, expected cpu or cuda: other devices are not supported yet")
    if where.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = where.index if where.index is not None else (torch.cuda.current_device() if count else 0)
    if index >= count:
        raise ValueError(f"device is {where}, expected one of the {count} GPUs that torch finds")
    return torch.device("cuda", index)


def one_device(stages: Sequence[torch.device]) -> torch.device:
    """That of all stages of a rank.

    Raises:
        ValueError: they are on several.
    """
    if any(device != stages[0] for device in stages):
        shown = ", ".join(str(device) for device in stages)
        raise ValueError(f"the stages of this rank are on {shown}, expected one device for all of them")
    return stages[0]


def channel_of(group: dist.ProcessGroup | None, device: torch.device) -> str:
    """For which channel plans are lowered and proven, as :func:`farandole.pipelining.validate` names them.

    With NCCL it is one queue for each rank, whatever the order in which its messages run: a host that loads a kernel,
    frees memory or synchronizes waits for all that the device was given, receives that have begun included. A receive
    that waits, by way of other ranks, for what this rank does later would never end then.

    Raises:
        RuntimeError: the group has no backend for them, or none for the CPU, over which ranks agree on steps.
    """
    if group is None or device.type == "cpu":
        return "tagged"
    for needed, purpose in ((device.type, "the tensors of its stages"), ("cpu", "what ranks agree on in each step")):
        if torch.device(needed) not in group._device_types:
            raise RuntimeError(
                f"the pipeline's group has no backend for {needed}, expected one for {purpose}: "
                "init_process_group('farandole'), or 'cpu:gloo,cuda:nccl'"
            )
    return "tagged" if is_over_ucx(group, device) else "one_queue_per_rank"


def has_one_queue(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Do the group's messages of tensors there also start one batch after another? As with torch's NCCL, which has one
    communicator for all; and over ours where CUDA has one queue for all streams.
    """
    if group is None or device.type == "cpu" or is_over_ucx(group, device):
        return False
    return not _is_ours(group, device) or os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"


def _is_ours(group: dist.ProcessGroup, device: torch.device) -> bool:
    return group._get_backend(device).name() == "farandole"


def is_over_ucx(group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Do the group's messages of tensors there go by UCX?"""
    if group is None or group.size() == 1 or device.type == "cpu":
        return False
    return _is_ours(group, device) and os.environ.get("FARANDOLE_CUDA_MESSAGES") == "ucx"
