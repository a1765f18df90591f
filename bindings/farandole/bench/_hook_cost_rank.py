"""A rank of the benchmark of what data parallelism costs the host for each parameter: nothing is added or sent."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn

from farandole.bench._ranks import Rank
from farandole.ddp import DistributedDataParallel

ALONE = "alone"
PARAMETERS = 2000


class _Scalars(nn.Module):
    """Parameters of one element, whose gradients come from one node."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(1)) for _ in range(PARAMETERS))

    def forward(self) -> torch.Tensor:
        return torch.cat(list(self.weights)).sum()


def time_hooks(rank: Rank, peers: list[str], count: int) -> dict[str, list[float]]:
    """Runs on all ranks, each by itself: seconds of a backward by peer, which take turns.

    Groups have one rank. Gradients are there, and autograd adds to them, as it does without a wrapper: what a wrapper
    takes beyond that is its hooks, and the begin and the end of a round.
    """
    torch.set_num_threads(1)
    if "hooks" not in rank.state:
        rank.state["hooks"] = {peer: _backward_of(rank, peer) for peer in peers}
        for backward in rank.state["hooks"].values():
            backward()
            backward()
    taken: dict[str, list[float]] = {peer: [] for peer in peers}
    turns = [*peers]
    for _ in range(count):
        turns.append(turns.pop(0))
        for peer in turns:
            taken[peer].append(rank.state["hooks"][peer]())
    return taken


def _backward_of(rank: Rank, peer: str) -> Callable[[], float]:
    model: nn.Module = _Scalars()
    if peer == "farandole":
        model = DistributedDataParallel(model, process_group=_alone(rank, "farandole"))
    elif peer != ALONE:
        group = _alone(rank, peer.removeprefix("torch over "))
        model = nn.parallel.DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)

    def backward() -> float:
        loss = model()
        start = time.perf_counter()
        loss.backward()
        return time.perf_counter() - start

    return backward


def _alone(rank: Rank, backend: str) -> dist.ProcessGroup:
    key = ("alone", backend)
    if key not in rank.state:
        rank.state[key] = dist.new_group([rank.rank], backend=backend, use_local_synchronization=True)
    group: dist.ProcessGroup = rank.state[key]
    return group
