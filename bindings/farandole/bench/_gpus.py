"""The GPUs of this machine, and how ranks are placed on them."""

from __future__ import annotations

import functools
import os
from dataclasses import dataclass

import torch

from farandole.bench._ranks import Rank, Ranks

# How two ranks may share a GPU: what NCCL is told on each of them.
# From 2.30 on it has a setting for it. Before, it refuses two ranks of one host on one GPU, and takes their word for
# the host that they are on; hosts are then joined by sockets, which is slow and right.
_BY_SETTING = "NCCL_MULTI_RANK_GPU_ENABLE"
_BY_HOST = "NCCL_HOSTID"
_MOST_RANKS = 4
_NCCL = "nccl"
_SECONDS_FOR_A_TRIAL = 60.0


@dataclass(frozen=True)
class Placement:
    """How many ranks, and where: one for each GPU, or several on one."""

    size: int
    sharing: str = ""  # what lets them share a GPU; empty: each has its own

    @classmethod
    def of(cls, size: int) -> Placement:
        """So many ranks, which share GPUs where there are fewer, as hosts of their own."""
        return cls(size, _BY_HOST if size > torch.cuda.device_count() else "")

    def __str__(self) -> str:
        ranks = f"{self.size} rank{'s' if self.size > 1 else ''}"
        return f"{ranks} on 1 GPU ({self.sharing})" if self.sharing else ranks

    def enter(self, rank: int) -> None:
        """First of all in the process of a rank: NCCL and CUDA are not in use there yet."""
        if self.sharing == _BY_SETTING:
            os.environ[_BY_SETTING] = "1"
        elif self.sharing == _BY_HOST:
            os.environ |= {_BY_HOST: f"rank {rank}", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
        torch.cuda.set_device(rank % torch.cuda.device_count())


def why_no_gpu() -> str | None:
    """None where CUDA tensors can be communicated."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is without CUDA"
    if not torch.distributed.is_nccl_available():
        return f"torch {torch.__version__} is without NCCL"
    if torch.cuda.device_count() == 0:
        return "no GPU"
    return None


@functools.cache
def several_ranks() -> Placement | str:
    """Where several ranks run: each on a GPU of its own, else two on one where NCCL lets them; or why none can."""
    if (gpus := torch.cuda.device_count()) > 1:
        return Placement(min(gpus, _MOST_RANKS))
    ways = [_BY_SETTING] if torch.cuda.nccl.version() >= (2, 30) else []
    refused = []
    for candidate in [Placement(2, way) for way in [*ways, _BY_HOST]]:
        try:
            with Ranks(candidate.size, [_NCCL], enter=candidate.enter) as ranks:
                ranks.call(_sum, timeout=_SECONDS_FOR_A_TRIAL)
        except RuntimeError as error:
            refused.append(f"{candidate}: {str(error).strip().splitlines()[-1]}")
        else:
            return candidate
    return "NCCL does not let ranks share the one GPU: " + "; ".join(refused)


def _sum(rank: Rank) -> None:
    """A trial, by torch's own ProcessGroupNCCL."""
    total = torch.ones(1000, device="cuda")
    torch.distributed.all_reduce(total, group=rank.groups[_NCCL])
    if not torch.equal(total, torch.full_like(total, rank.size)):
        raise RuntimeError("the sum is wrong")


def sleep_cycles(seconds: float) -> int:
    """How long torch.cuda._sleep must sleep for so many seconds, as measured."""
    torch.cuda._sleep(200_000_000)  # an idle GPU runs slower
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    torch.cuda._sleep(10_000_000)
    end.record()
    end.synchronize()
    return int(10_000_000 * seconds / (start.elapsed_time(end) / 1e3))
