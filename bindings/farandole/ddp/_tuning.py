"""The bucket size that measured times ask for."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from farandole import _C
from farandole.ddp._copying import HookOfOne
from farandole.ddp._ignored import named_parameters
from farandole.ddp._options import Replicas, parameters_of

if TYPE_CHECKING:
    from farandole.ddp._wrapper import DistributedDataParallel

TUNED_ROUNDS = 4  # of which the first one is not like the others
_REPETITIONS = 3
_PAUSE = 1e-3  # seconds, after which a core has gone idle
_SHOWN = 0.25  # of what was predicted to be saved: less may be chance
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
    """Measures the first backwards that synchronize, gives the model a reducer with the bucket size that is predicted to
    be best, and takes the old one again unless as many backwards with it show a quarter of what it was to save.

    When each gradient comes, and when backward ends, is the median over rounds of what the slowest rank saw; what a
    reduction takes, by size, and what its start takes of the thread that computes, are measured once over the model's
    group, of the slowest rank, too. So all ranks know the same, and rank 0 says what follows. Reducers are made at the
    start of a forward that will be differentiated and reduced, which all ranks have alike: a collective. Gradients that
    are there stay. Threads: the one that runs forwards.
    """

    def __init__(self, model: DistributedDataParallel, options: _C.ReducerOptions) -> None:
        self.reason: str | None = None
        self.is_pending = True
        self._options = options
        self._trial: _Trial | None = None
        self._recorded = _C.GradTimeline()
        model._record(self._recorded)
        self._handle = model.register_forward_pre_hook(HookOfOne(self._before_forward))

    def _before_forward(self, model: Any, args: Any) -> None:
        if not torch.is_grad_enabled() or not model.require_backward_grad_sync:
            return
        # Of how many rounds there were all ranks know; in one, or in a backward, the reducer stays.
        reducer = model._reducer
        if reducer.rounds() < TUNED_ROUNDS or reducer.is_in_round() or torch._C._current_graph_task_id() != -1:
            return
        reducer.begin_step()  # raises where the group was abandoned
        for name, parameter in named_parameters(model.module, model.parameters_to_ignore):
            if parameter.requires_grad != (name in model._trainable):
                raise RuntimeError(
                    f"bucket_size='auto': parameter '{name}' was {'un' if parameter.requires_grad else ''}frozen after "
                    "the module was wrapped: expected a bucket_size in elements"
                )
        self._try(model) if self._trial is None else self._judge(model, self._trial)

    def _try(self, model: DistributedDataParallel) -> None:
        grads = [grad for _, grad in model._reducer.main_grads()]
        events = self._recorded.events()
        widest = max(grads, key=lambda grad: grad.element_size())
        total = sum(grad.numel() * grad.element_size() for grad in grads)
        sizes = [size for size in _SIZES if size < total] or [_SIZES[0]]
        costs = [_time_reduction(model.replicas, widest, size) for size in sizes]
        start = _time_start(model.replicas.group, widest)
        before, end, start, *known = _slowest(
            model, [_round_seconds(events), _end_time(events), start, *_ready_times(events, len(grads)), *costs]
        )
        points = list(zip(sizes, known[len(grads) :], strict=True))
        choice = _C.choose_bucket_size(model._reducer, known[: len(grads)], end, points, start)
        if not _told(model, choice.is_worthwhile):
            self._finish(model, f"{_name(choice.now)} stays: {_predicted(choice)}; {_because(choice, points, start)}")
            return
        self._trial = _Trial(choice, before, _because(choice, points, start))
        _rebuild(model, self._options, _told(model, choice.best.bucket_size))
        self._recorded = _C.GradTimeline()
        model._record(self._recorded)

    def _judge(self, model: DistributedDataParallel, trial: _Trial) -> None:
        (after,) = _slowest(model, [_round_seconds(self._recorded.events())])
        now, best = trial.choice.now, trial.choice.best
        said = f"predicted {_ms(best.exposed)} exposed, against {_ms(now.exposed)}"
        measured = f"measured {_ms(after)} for a backward, against {_ms(trial.before)}"
        if _told(model, trial.before - after < _SHOWN * (now.exposed - best.exposed)):
            _rebuild(model, self._options, now.bucket_size)
            self._finish(model, f"{_name(now)} stays: {_name(best)} was {said}, but {measured}; {trial.because}")
        else:
            self._finish(model, f"{_name(best)}: {said} with {_name(now)}; {measured}; {trial.because}")

    def _finish(self, model: DistributedDataParallel, reason: str) -> None:
        self.reason = f"bucket_size={reason}"
        self.is_pending = False
        self._handle.remove()
        model._record(None)
        if all(group.rank() == 0 for group in _groups(model.replicas)):
            print(f"farandole.ddp: {self.reason}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class _Trial:
    choice: _C.TuningChoice
    before: float  # seconds of a backward with the old size
    because: str


def _rebuild(model: DistributedDataParallel, options: _C.ReducerOptions, bucket_size: int) -> None:
    """Between rounds: the parameters get other buffers, and gradients that are there move into them."""
    options.broadcasts = False
    options.bucket_size = bucket_size
    reducer = _C.GradReducer(
        model.replicas.packed(),
        model.experts.packed(),
        parameters_of(model.module, model.parameters_to_ignore),
        [],  # which were compared when the module was wrapped
        options,
        None,
    )
    with torch.no_grad():
        for name, main_grad in reducer.main_grads():
            parameter: Any = model._trainable[name]
            if parameter.grad is not None and parameter.grad.data_ptr() == parameter.main_grad.data_ptr():
                main_grad.copy_(parameter.grad)
                parameter.grad = main_grad
            parameter.main_grad = main_grad
    reducer.follow(model._reducer)
    if model.require_manual_backward_finalization:
        reducer.require_manual_end(True)
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


def _time_start(group: dist.ProcessGroup, like: torch.Tensor) -> float:
    """Seconds until a small reduction is under way, on a core that has been idle."""
    data = torch.zeros(1, dtype=torch.float32 if like.is_complex() else like.dtype, device=like.device)
    taken = []
    for _ in range(1 + _REPETITIONS):
        time.sleep(_PAUSE)
        start = time.perf_counter()
        work = dist.all_reduce(data, group=group, async_op=True)
        taken.append(time.perf_counter() - start)
        if work is not None:
            work.wait()
    return statistics.median(taken[1:])


def _groups(replicas: Replicas) -> list[dist.ProcessGroup]:
    return [replicas.group] if replicas.instances is None else [replicas.group, replicas.instances]


def _slowest(model: DistributedDataParallel, mine: list[float]) -> list[float]:
    """The largest that any rank has, each."""
    values = torch.tensor(mine, dtype=torch.float64, device=model.device)
    for group in _groups(model.replicas):
        dist.all_reduce(values, dist.ReduceOp.MAX, group=group)
    return [float(value) for value in values.tolist()]


def _told(model: DistributedDataParallel, mine: int) -> int:
    """What the first rank has."""
    value = torch.tensor([int(mine)], dtype=torch.int64, device=model.device)
    for group in reversed(_groups(model.replicas)):
        dist.broadcast(value, group=group, group_src=0)
    return int(value.item())


def _round_seconds(events: list[Any]) -> float:
    """From the first gradient of a round to its end."""
    return _median_round(events, lambda start, end: end)


def _end_time(events: list[Any]) -> float:
    """From the first gradient of a round to the end of its backward, where the wait for reductions begins."""
    return _median_round(events, lambda start, end: start)


def _median_round(events: list[Any], of_wait: Callable[[float, float], float]) -> float:
    """Seconds, the median over rounds without the first one. 0: none was seen."""
    began: dict[int, float] = {}
    waited: dict[int, float] = {}
    for kind, _, number, start, end, _ in events:
        if kind == _C.GradEvent.ready:
            began.setdefault(number, start)
        elif kind == _C.GradEvent.wait and end is not None:
            waited[number] = of_wait(start, end)
    taken = [waited[number] - began[number] for number in sorted(began) if number in waited]
    return statistics.median(taken[1:] or taken or [0.0])


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"


def _name(one: _C.BucketPrediction) -> str:
    return f"{one.bucket_size} ({one.buckets} bucket{'s' if one.buckets != 1 else ''})"


def _predicted(choice: _C.TuningChoice) -> str:
    return f"predicted {_ms(choice.now.exposed)} exposed, and no other is better by 2% of a backward"


def _because(choice: _C.TuningChoice, points: list[tuple[int, float]], start: float) -> str:
    (first, latency), (last, slowest) = points[0], points[-1]
    rate = f" + {(last - first) / (slowest - latency) / 1e9:.3g} GB/s" if slowest > latency else ""
    return f"a reduction takes {_ms(latency)}{rate}, its start {_ms(start)}, a backward {_ms(choice.backward)}"
