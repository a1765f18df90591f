"""The bucket size that measured times ask for."""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from farandole import _C
from farandole.ddp._copying import HookOfOne
from farandole.ddp._options import Replicas, parameters_of

if TYPE_CHECKING:
    from farandole.ddp._wrapper import DistributedDataParallel

TUNED_ROUNDS = 4  # of which the first one is not like the others
_REPETITIONS = 3
_SIZES = tuple(1 << power for power in range(10, 27, 2))  # bytes: to 64 MiB


def is_auto(bucket_size: Any, **others: bool) -> bool:
    """Whether the size is to be chosen. A ValueError where ``others`` do not allow it."""
    if not isinstance(bucket_size, str):
        return False
    if bucket_size != "auto":
        raise ValueError(f"bucket_size={bucket_size!r}: expected a number of elements or 'auto'")
    for name, expected, why in (
        ("use_distributed_optimizer", False, "the layout of what is sharded never changes"),
        ("grad_reduce_in_fp32", False, "main_grad is what an optimizer holds"),
        ("disable_bucketing", False, "there are no buckets"),
        ("overlap_grad_reduce", True, "no bucket is reduced before all gradients are there"),
    ):
        if others[name] is not expected:
            raise ValueError(f"bucket_size='auto' with {name}={not expected}: {why}; expected a number of elements")
    return True


class BucketTuner:
    """Measures the first backwards that synchronize, then gives the model a reducer with the best bucket size.

    When each gradient comes is the median over rounds of what the slowest rank saw; what a reduction takes, by size, is
    measured once over the model's group, of the slowest rank, too. So all ranks know the same, and rank 0 says what
    follows. It is done at the start of a forward that will be differentiated and reduced, which all ranks have alike:
    a collective. Gradients that are there stay. Threads: the one that runs forwards.
    """

    def __init__(self, model: DistributedDataParallel, options: _C.ReducerOptions) -> None:
        self.reason: str | None = None
        self.is_pending = True
        self._options = options
        self._recorded = _C.GradTimeline()
        model._record(self._recorded)
        self._handle = model.register_forward_pre_hook(HookOfOne(self._before_forward))

    def needs(self, timeline: _C.GradTimeline | None) -> bool:
        """False where it was for the measured rounds, which are over."""
        return self.is_pending or timeline is not self._recorded

    def _before_forward(self, model: Any, args: Any) -> None:
        if not torch.is_grad_enabled() or not model.require_backward_grad_sync:
            return
        # Of how many rounds there were all ranks know; in one, or in a backward, the reducer stays.
        reducer = model._reducer
        if reducer.rounds() < TUNED_ROUNDS or reducer.is_in_round() or torch._C._current_graph_task_id() != -1:
            return
        self._handle.remove()
        self.is_pending = False
        if model._timeline is self._recorded:
            model._record(None)
        self._tune(model)

    def _tune(self, model: DistributedDataParallel) -> None:
        model._reducer.begin_step()  # raises where the group was abandoned
        grads = [grad for _, grad in model._reducer.main_grads()]
        ready = _ready_times(self._recorded.events(), len(grads))
        widest = max(grads, key=lambda grad: grad.element_size())
        total = sum(grad.numel() * grad.element_size() for grad in grads)
        sizes = [size for size in _SIZES if size < total] or [_SIZES[0]]
        seconds = [_time_reduction(model.replicas, widest, size) for size in sizes]
        known = torch.tensor([*ready, *seconds], dtype=torch.float64, device=widest.device)
        for group in _groups(model.replicas):
            dist.all_reduce(known, dist.ReduceOp.MAX, group=group)
        ready, seconds = known[: len(ready)].tolist(), known[len(ready) :].tolist()
        choice = _C.choose_bucket_size(model._reducer, ready, list(zip(sizes, seconds, strict=True)))
        chosen = torch.tensor(
            [choice.best.bucket_size if choice.is_worthwhile else 0], dtype=torch.int64, device=widest.device
        )
        for group in reversed(_groups(model.replicas)):
            dist.broadcast(chosen, group=group, group_src=0)
        self.reason = _reason(choice, list(zip(sizes, seconds, strict=True)))
        if all(group.rank() == 0 for group in _groups(model.replicas)):
            print(f"farandole.ddp: {self.reason}", file=sys.stderr, flush=True)
        if chosen.item() > 0:
            self._options.bucket_size = int(chosen.item())
            _rebuild(model, self._options)


def _rebuild(model: DistributedDataParallel, options: _C.ReducerOptions) -> None:
    """Between rounds: the parameters get other buffers, and gradients that are there move into them."""
    options.broadcasts = False
    reducer = _C.GradReducer(
        model.replicas.packed(),
        model.experts.packed(),
        parameters_of(model.module),
        list(model.module.named_buffers()),
        options,
        None,
    )
    with torch.no_grad():
        for name, main_grad in reducer.main_grads():
            parameter: Any = model._trainable[name]
            if parameter.grad is parameter.main_grad:
                main_grad.copy_(parameter.grad)
                parameter.grad = main_grad
            parameter.main_grad = main_grad
    model._reducer = reducer
    model._record(model._timeline)


def _ready_times(events: list[Any], count: int) -> list[float]:
    """By parameter, from the first gradient of its round on; the median over rounds without the first recorded one."""
    rounds: dict[int, dict[int, float]] = {}
    for kind, index, number, start, _, _ in events:
        if kind == _C.GradEvent.ready:
            rounds.setdefault(number, {})[index] = start
    seen = [times for _, times in sorted(rounds.items())]
    if len(seen) > 1:
        del seen[0]
    since = [{index: time - min(times.values()) for index, time in times.items()} for times in seen]
    known = {
        index: statistics.median(times[index] for times in since if index in times)
        for index in range(count)
        if any(index in times for times in since)
    }
    # One that gets none is reduced with what is there at the end.
    last = max(known.values(), default=0.0)
    return [known.get(index, last) for index in range(count)]


def _time_reduction(replicas: Replicas, like: torch.Tensor, size: int) -> float:
    """Seconds of one reduction of so many bytes, all its steps, by itself."""
    dtype = torch.float32 if like.is_complex() else like.dtype
    data = torch.zeros(size // dtype.itemsize, dtype=dtype, device=like.device)
    taken = []
    for _ in range(1 + _REPETITIONS):
        start = time.perf_counter()
        for group in _groups(replicas):
            dist.all_reduce(data, group=group)
        if data.is_cuda:
            torch.cuda.synchronize(data.device)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken[1:])


def _groups(replicas: Replicas) -> list[dist.ProcessGroup]:
    return [replicas.group] if replicas.instances is None else [replicas.group, replicas.instances]


def _reason(choice: _C.TuningChoice, points: list[tuple[int, float]]) -> str:
    def described(one: _C.BucketPrediction) -> str:
        return f"{one.bucket_size} ({one.buckets} bucket{'s' if one.buckets != 1 else ''})"

    now, best = choice.now, choice.best
    (first, latency), (last, slowest) = points[0], points[-1]
    rate = f" + {(last - first) / (slowest - latency) / 1e9:.3g} GB/s" if slowest > latency else ""
    because = f"a reduction takes {latency * 1e3:.3g} ms{rate}, backward {choice.backward * 1e3:.3g} ms"
    if choice.is_worthwhile:
        return (
            f"bucket_size={described(best)}: predicted {best.exposed * 1e3:.3g} ms exposed, against "
            f"{now.exposed * 1e3:.3g} ms with {described(now)}; {because}"
        )
    return (
        f"bucket_size={described(now)} stays: predicted {now.exposed * 1e3:.3g} ms exposed, and no other is better by "
        f"2%; {because}"
    )
