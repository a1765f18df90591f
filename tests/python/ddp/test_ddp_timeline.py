"""A recorded timeline has every gradient, bucket, wait and gather, in an order that cause and effect allow."""

from __future__ import annotations

import collections
import json
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_models import BACKENDS

from farandole.ddp import DistributedDataParallel, DistributedOptimizer, Timeline, TimelineEvent
from support.devices import ON_CPU
from support.processes import run_ranks

_LAYERS, _SLEEP, _ROUNDS = 4, 0.05, 2


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        time.sleep(_SLEEP)
        return grad


class _Slow(torch.nn.Module):
    """Each layer's gradients come so much later than the next one's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = _Sleep.apply(layer(x))
        return x.square().mean()


def _record(rank: int, world_size: int, sharded: bool) -> tuple[list[TimelineEvent], str, str]:
    model = DistributedDataParallel(
        _Slow(), bucket_size=8 * 8 + 8, use_distributed_optimizer=sharded, overlap_param_gather=sharded
    )
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if sharded:
        optimizer = DistributedOptimizer(optimizer, model)
    x = torch.randn(3, 8)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with model.record_timeline() as timeline:
        for _ in range(_ROUNDS):
            step()
            with model.no_sync():
                model(x).backward()  # no round
            optimizer.zero_grad()
        assert timeline.rounds == _ROUNDS
    step()  # not recorded
    assert timeline.rounds == _ROUNDS
    gathered = timeline.gather()
    assert isinstance(gathered, Timeline)
    return gathered.events(), timeline.chrome_trace(), gathered.chrome_trace()


@pytest.mark.sample(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
def test_rounds_show_what_came_before_what(backend, sharded):
    world = 2
    results = run_ranks(_record, world, backend, sharded=sharded)
    events = results[0][0]
    assert events == results[1][0]
    parameters = {f"layers.{i}.{name}" for i in range(_LAYERS) for name in ("weight", "bias")}
    for rank in range(world):
        for number in range(_ROUNDS):
            mine = [event for event in events if event.rank == rank and event.round == number]
            of_kind: dict[str, list[TimelineEvent]] = collections.defaultdict(list)
            for event in mine:
                assert event.start <= event.end
                of_kind[event.kind].append(event)
            ready = {event.name: event.start for event in of_kind["ready"]}
            assert set(ready) == parameters
            reductions = sorted(of_kind["reduction"], key=lambda event: event.start)
            assert [event.name for event in reductions] == [f"bucket {b}" for b in range(_LAYERS)]
            tells = ON_CPU
            # The last one may be seen to be over just before its future says so.
            assert not tells or sum(event.is_exact for event in reductions) >= _LAYERS - 1
            assert tells or not any(event.is_exact for event in reductions)
            (wait,), (report,) = of_kind["wait"], of_kind["report"]
            assert wait.end <= report.start
            for bucket, reduction in enumerate(reductions):
                layer = _LAYERS - 1 - bucket
                came = max(ready[f"layers.{layer}.{name}"] for name in ("weight", "bias"))
                # Issued when its gradients were there, and before those of the layer before came.
                assert came <= reduction.start < min(ready.get(f"layers.{layer - 1}.weight", wait.start), wait.start)
                assert reduction.end <= wait.end + 0.1
            for layer in range(1, _LAYERS):
                assert ready[f"layers.{layer}.weight"] + 0.9 * _SLEEP < ready[f"layers.{layer - 1}.weight"]
            assert (reductions[0].end < wait.start) is tells
            assert len(of_kind["gather"]) == (_LAYERS if sharded and number > 0 else 0)
    if sharded:
        gathers = [event for event in events if event.kind == "gather"]
        assert {event.round for event in gathers} == {number + 1 for number in range(_ROUNDS)}


def _check_trace(text: str, ranks: set[int], rows: set[str]) -> None:
    trace = json.loads(text)["traceEvents"]
    assert {event["pid"] for event in trace} == ranks
    titles = {(e["pid"], e["tid"]): e["args"]["name"] for e in trace if e["name"] == "thread_name"}
    assert set(titles.values()) == rows
    boxes = collections.defaultdict(list)
    for event in trace:
        if event["ph"] == "X":
            boxes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        if event["ph"] == "i":
            assert titles[event["pid"], event["tid"]] == "parameters"
    for place, row in boxes.items():
        row.sort()
        assert titles[place] != "parameters"
        assert all(end <= start + 0.01 for (_, end), (start, _) in zip(row, row[1:])), "boxes of a row overlap"


def test_a_trace_has_a_process_for_each_rank_and_rows_without_overlaps():
    results = run_ranks(_record, 2, BACKENDS[-1], sharded=True)
    rows = {"parameters", "buckets", "waits", "gathers"}
    for rank, (_, own, all_ranks) in enumerate(results):
        _check_trace(own, {rank}, rows)
        _check_trace(all_ranks, {0, 1}, rows)


def _record_instances(rank: int, world_size: int) -> list[TimelineEvent]:
    instances = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model = DistributedDataParallel(
        _Slow(),
        bucket_size=8 * 8 + 8,
        use_distributed_optimizer=True,
        process_group=instances[rank // 2],
        instance_process_group=across[rank % 2],
    )
    with model.record_timeline() as timeline:
        model(torch.randn(3, 8)).backward()
    return timeline.events()


def test_reductions_of_two_steps_have_one_end():
    for events in run_ranks(_record_instances, 4, BACKENDS[-1]):
        reductions = [event for event in events if event.kind == "reduction"]
        (wait,) = (event for event in events if event.kind == "wait")
        assert len(reductions) == _LAYERS
        assert all(event.end <= wait.end + 0.1 for event in reductions)
        exact = sum(event.is_exact for event in reductions)
        assert exact >= _LAYERS - 1 if ON_CPU else exact == 0
