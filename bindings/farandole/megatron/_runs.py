"""Compiled steps, kept for as long as their pipeline's group lives: number of microbatches and shapes may change."""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from farandole import _C
from farandole._rank_names import rank_name
from farandole.megatron._chunk import Call, Chunk
from farandole.megatron._shapes import DeclaredShapes
from farandole.pipelining import _plans
from farandole.pipelining._devices import channel_of, has_one_queue

_KEPT = 8  # of each group; a batch size that ramps up leaves its earlier ones behind


@dataclass(frozen=True)
class RunKey:
    """What a compiled step depends on; the same on all ranks of the pipeline."""

    num_chunks: int | None  # None: not interleaved
    num_microbatches: int
    microbatch_group: int | None
    forward_only: bool
    both: bool  # an encoder and a decoder
    confirms: bool  # ranks agree before the step begins, for what all of them take part in
    checks_for_nan: bool
    shapes: Any  # what the shapes are computed from; None where they come with the tensors
    device: torch.device = field(repr=False)  # of the models; another index on each rank


class Run:
    """A plan compiled for this rank, with its chunks. Used by one call at a time."""

    def __init__(self, key: RunKey, group: dist.ProcessGroup | None, shapes: DeclaredShapes | None, relays: bool):
        self.key = key
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        chunks = key.num_chunks or 1
        plan = _plans.plan(
            "1F1B" if key.num_chunks is None else "Interleaved1F1B",
            size * chunks,
            key.num_microbatches,
            num_ranks=size,
            forward_only=key.forward_only,
            microbatch_group=key.microbatch_group,
        )
        order = _computations(plan.actions[rank])
        self.forwards = [(stage // size, microbatch) for kind, stage, microbatch in order if kind == "F"]
        self.backwards = [(stage // size, microbatch) for kind, stage, microbatch in order if kind == "B"]
        self.num_warmup = _num_warmup(key, size, rank)
        last = size * chunks - 1
        self._chunks = [
            Chunk(number, is_virtual=key.num_chunks is not None, is_last=number * size + rank == last, relays=relays)
            for number in range(chunks)
        ]
        self._learns = size > 1 and shapes is None
        self._executor = _C.PipelineExecutor(
            plan=_plans.lower(plan, channel_of(group, key.device)),
            rank=rank,
            group=group,
            stages=[
                _C.PipelineStage(
                    index=number * size + rank,
                    is_first=number * size + rank == 0,
                    is_last=number * size + rank == last,
                    module=chunk,
                    loss_fn=None if key.forward_only else _loss_itself,
                    declared_inputs=None if shapes is None else shapes.receives,
                    declared_outputs=None if shapes is None or number * size + rank == last else shapes.sends,
                    outputs_to={},
                    require_grad_sync=None if key.forward_only else chunk.require_grad_sync,
                    abandon_grad_sync=None if key.forward_only else chunk.abandon_grad_sync,
                    finish_grad_sync=None if key.forward_only else chunk.finish_grad_sync,
                    around_backward=chunk.around_backward,
                )
                for number, chunk in enumerate(self._chunks)
            ],
            loss_scale=1.0,
            description=f"Megatron {'forward only' if key.forward_only else 'forward-backward'}, rank {rank}, {key}",
            rank_name=rank_name(group),
            shapes_declared=not self._learns,
            checks_for_nan=key.checks_for_nan,
            alike=int.from_bytes(hashlib.sha256(repr((key, key.device.type)).encode()).digest()[:8], "little"),
            device=key.device,
            one_queue=has_one_queue(group, key.device),
        )
        count = key.num_microbatches
        self._args: list[tuple[Any, ...]] = [()] * count
        self._numbers: list[dict[str, Any]] = [{"microbatch": number} for number in range(count)]
        self._targets = [None] * count

    def confirm(self) -> None:
        """Raises RuntimeError on all ranks where any refuses the step."""
        self._executor.confirm()

    def release_buffers(self) -> None:
        self._executor.release_buffers()

    def step(self, call: Call, captured: bool) -> None:
        """Raises RuntimeError on all ranks where any fails. `captured`: in a CUDA graph."""
        for chunk in self._chunks:
            chunk.call = call
        try:
            self._executor.step(
                args=self._args,
                kwargs=self._numbers,
                targets=self._targets,
                loss_kwargs=None,
                outputs=None,
                losses=None,
                relearn=self._learns,
                captured=captured,
            )
        finally:
            call.stop_backward_timer()
            for chunk in self._chunks:
                chunk.call = None


class _NoGroup:
    """Stands for the group of what has no pipeline."""


_no_group = _NoGroup()
_runs: weakref.WeakKeyDictionary[Any, OrderedDict[RunKey, Run]] = weakref.WeakKeyDictionary()


def run_for(key: RunKey, group: dist.ProcessGroup | None, make: Callable[[], Run]) -> Run:
    """The one that an earlier call has left, or a new one."""
    kept = _runs.setdefault(_no_group if group is None else group, OrderedDict())
    if kept and next(reversed(kept)) != key:
        next(reversed(kept.values())).release_buffers()
    run = kept.get(key)
    if run is None:
        run = kept[key] = make()
        while len(kept) > _KEPT:
            kept.popitem(last=False)
    kept.move_to_end(key)
    return run


def _num_warmup(key: RunKey, size: int, rank: int) -> int | None:
    """Forwards before those that alternate with backwards, as Megatron counts them; None without a pipeline."""
    if size == 1:
        return None
    if key.num_chunks is None:
        return min(size - rank - 1, key.num_microbatches)
    total = key.num_chunks * key.num_microbatches
    warmup = 2 * (size - rank - 1) + (key.num_chunks - 1) * (key.microbatch_group or size)
    return total if key.forward_only else min(warmup, total)


def _computations(actions: list[str]) -> list[tuple[str, int, int]]:
    """(kind, stage, microbatch) of texts such as 3F0."""
    computations = []
    for action in actions:
        kind = "F" if "F" in action else "B"
        stage, microbatch = action.split(kind)
        computations.append((kind, int(stage), int(microbatch)))
    return computations


def _loss_itself(loss: Any, _target: Any) -> Any:
    return loss
