"""The c10d backend as Python sees it."""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing.util
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from farandole import _C, _flight_recorder

# Before the interpreter is torn down: callbacks of what then fails must not enter it any more.
atexit.register(_C.leave)
_finalized_pid = 0


def _leave_with_multiprocessing() -> None:
    """The same in a child of multiprocessing, which ends without what atexit has."""
    global _finalized_pid
    if _finalized_pid == os.getpid():
        return
    _finalized_pid = os.getpid()
    multiprocessing.util.Finalize(None, _C.leave, exitpriority=0)


def create_backend(options: Any, backend_options: Any = None) -> Any:
    """Makes the backend of one group; what ``init_process_group("farandole")`` calls.

    Args:
        options: torch's ``_DistributedBackendOptions`` (store, rank, size, timeout).
        backend_options: None, or ``ProcessGroupFarandole.Options``; as with torch's own
            backends the ``timeout`` of the call wins over theirs.
    """
    try:
        _check_options(options, backend_options)
        _leave_with_multiprocessing()
        _settle_devices()
        _flight_recorder.settle_who_records()
    except Exception as error:
        with contextlib.suppress(Exception):
            _C.refuse_backend(options, str(error))  # the others need not wait for this rank
        raise
    return _C.create_backend(options)


def _check_options(options: Any, backend_options: Any) -> None:
    if backend_options is not None and not isinstance(backend_options, _C.ProcessGroupFarandole.Options):
        raise ValueError(f"pg_options is {backend_options!r}; expected None or ProcessGroupFarandole.Options")
    if getattr(options, "enable_reconfigure", False):  # torch 2.15's
        raise NotImplementedError(
            "farandole: enable_reconfigure=True: expected False, the ranks of a group stay those that it was made of"
        )
    if options.timeout < timedelta(0):
        raise ValueError(f"timeout is {options.timeout}; expected 0 or more")


def _settle_devices() -> None:
    """Where there is no GPU, what asks torch for the backend's devices is told of the CPU alone.

    A ShardedTensor takes another one than the CPU for its messages where the backend has one. It is not known earlier:
    the backend is registered while torch is imported.
    """
    if torch.cuda.device_count() == 0:
        dist.Backend.backend_capability["farandole"] = ["cpu"]


def batch_p2p(ops: Sequence[dist.P2POp], label: str = "") -> dict[int, dist.Work]:
    """Posts a batch of sends and receives, ordered by peer, and returns one Work for each peer.

    The order in which a rank lists operations with different tags does not
    matter: two ranks that list the same operations in different orders match, and
    no order can deadlock. Operations with equal (peer, direction, tag) match in
    list order.

    Args:
        ops: as for :func:`torch.distributed.batch_isend_irecv`; all of one group,
            whose backend for the tensors' device is farandole. A tensor that a functional collective has returned is
            awaited.
        label: shown in errors, logs and profiles.

    Returns:
        A map from peer (rank in the group) to the Work of all operations with it;
        empty for an empty batch.

    Raises:
        ValueError: an operation with a wrong peer, tag or tensor; nothing is posted.
    """
    if not ops:
        return {}
    group = ops[0].group if ops[0].group is not None else dist.group.WORLD
    backend = _backend_of(group, ops[0].tensor.device)
    entries = []
    for index, op in enumerate(ops):
        if (op.group if op.group is not None else dist.group.WORLD) is not group:
            raise ValueError(f"ops[{index}] belongs to another group than ops[0]; expected one group in a batch")
        if op.op not in (dist.isend, dist.irecv):
            raise ValueError(f"ops[{index}].op is {op.op!r}; expected torch.distributed.isend or irecv")
        entries.append((op.op is dist.isend, _awaited(op.tensor), op.group_peer, op.tag))
    return backend.batch_p2p(entries, label)


def _awaited(tensor: torch.Tensor) -> torch.Tensor:
    """The result itself of a functional collective that may be under way (an AsyncCollectiveTensor)."""
    if type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return tensor
    # Who made such a tensor has imported it.
    functional: Any = sys.modules.get("torch.distributed._functional_collectives")
    is_pending = functional is not None and isinstance(tensor, functional.AsyncCollectiveTensor)
    return tensor.trigger_wait() if is_pending else tensor


def connect_edges(
    group: dist.ProcessGroup | None = None,
    *,
    send_to: Sequence[int] = (),
    recv_from: Sequence[int] = (),
    device: torch.device | str | int | None = None,
) -> None:
    """Begins to connect what CUDA messages to some ranks, and from some, go along, and returns at once.

    Over NCCL each direction between two ranks is connected by itself, when the first message goes along it, which then
    takes as long as that. A program that knows its neighbours connects them ahead. A connection needs both ranks, in
    whatever order they ask for theirs: by this call, or by a first message. What is connected already stays.

    Args:
        group: None is the default group.
        send_to: ranks in the group; this rank itself needs no connection.
        recv_from: the same.
        device: of the tensors; None is the current CUDA device.

    Raises:
        ValueError: a rank that is not in the group, or a device that is not a CUDA device.
    """
    where = torch.device("cuda") if device is None else torch.device(device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    backend = _backend_of(group if group is not None else dist.group.WORLD, where)
    backend.connect_edges(where, list(send_to), list(recv_from))


def transport_report(group: dist.ProcessGroup | None = None) -> dict[int, str]:
    """What carries this rank's CPU messages to every rank of the group, e.g. ``{0: "self", 1: "ucx: posix, cma"}``."""
    backend = _backend_of(group if group is not None else dist.group.WORLD, torch.device("cpu"))
    return {rank: backend.transport_of(rank) for rank in range(backend.size())}


def algorithms(group: dist.ProcessGroup | None = None) -> list[str]:
    """Which algorithms the group's collectives on CPU use: one line for each rule, of which the first that fits counts.

    Of two ranks of a host a last line says whether they have found it cheap to read each other's memory.

    The setting ``FARANDOLE_ALGORITHMS`` puts rules before the others, on all ranks alike. Entries are
    ``operation=algorithm`` or ``operation:bytes-bytes=algorithm`` with commas between them, e.g.
    ``all_reduce:-16K=slots,all_reduce:64K-=ring,broadcast=hierarchical/chain``: ``slots``, ``windows``, ``memory`` and
    ``messages`` are used by ranks that share memory, the others between hosts; what follows ``hierarchical/`` is used
    between the hosts.
    """
    return _backend_of(group if group is not None else dist.group.WORLD, torch.device("cpu")).algorithms()


def _backend_of(group: Any, device: torch.device) -> Any:
    if group is None:
        raise ValueError("there is no default process group; call init_process_group first, or pass a group")
    backend = group._get_backend(device)
    backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it
    if not isinstance(backend, _C.ProcessGroupFarandole):
        raise ValueError(f"the group's backend for {device.type} is {backend.name()}; expected farandole")
    return backend
