"""This rank's part of a model, cut into the tensors that its optimizer updates."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from farandole import _C
from farandole.ddp._options import grad_place
from farandole.ddp._shown_gradients import note_shown
from farandole.ddp._whole import WholeParameters
from farandole.ddp._wrapper import DistributedDataParallel

MASTERED = (torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(frozen=True)
class Piece:
    """A part of one parameter, flattened."""

    name: str
    parameter: torch.Tensor
    begin: int  # elements: where it lies in the parameter
    numel: int
    offset: int  # elements: where it lies in the run

    def of(self, run_tensor: torch.Tensor) -> torch.Tensor:
        """Its elements of a tensor that has one for each element of the run, flat: a view where that is contiguous."""
        return run_tensor.reshape(-1)[self.offset : self.offset + self.numel]

    def put(self, run_tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrites its elements of such a tensor by flat ones."""
        if run_tensor.is_contiguous():
            self.of(run_tensor).copy_(values)
        else:  # a whole parameter, in its own strides
            run_tensor.copy_(values.view(run_tensor.shape))


def _padding_of(pieces: list[Piece], grads: torch.Tensor) -> list[torch.Tensor]:
    """What lies between the pieces."""
    gaps = [(piece.offset + piece.numel, following.offset) for piece, following in itertools.pairwise(pieces)]
    return [grads[begin:end] for begin, end in gaps if begin < end]


def _take_changed(copy: torch.Tensor, source: torch.Tensor) -> None:
    """Elements of which the copy is not the longer form become those of the source."""
    written = source.to(copy.dtype)
    copy.copy_(torch.where(copy.to(source.dtype).to(copy.dtype) == written, copy, written))


class Run:
    """What the optimizer updates as one tensor.

    Where the model is sharded and the optimizer elementwise, it is flat: neighbours in this rank's part of a bucket
    that share a param group, with the padding between them, which stays zero. Else it is one parameter, as it is.
    ``tensor`` is the parameters themselves, or a float32 copy where they have a shorter type.
    """

    def __init__(
        self,
        group: int,
        pieces: list[Piece],
        data: torch.Tensor,
        grads: torch.Tensor,
        is_expert: bool,
        is_whole: bool = False,
        shown: torch.Tensor | None = None,
        is_part: bool = False,
    ) -> None:
        """``is_whole``: one parameter. ``shown``: that whose ``grad`` says whether there is a gradient; None where there
        always is one. ``is_part``: several ranks have parts of the gradients of its bucket."""
        self.group = group
        self.pieces = pieces
        self.is_expert = is_expert
        self.padding = _padding_of(pieces, grads)
        self._data = data
        self._grads = grads
        self.is_whole = is_whole
        self._shown = shown
        self.copied: torch.Tensor | None = None  # what the optimizer has a copy of
        self._copied_versions: list[int] = []  # of gradients when the copy was the same
        self._held: list[tuple[Any, Piece, torch.Tensor]] = []  # of frozen parameters, during a step
        self._state: Mapping[Any, Any] = {}
        self.stand_in: dict[str, Any] | None = None  # for the state of one that was never stepped, to be loaded into
        self.has_master = data.dtype in MASTERED
        master = data.detach().to(torch.float32).contiguous() if self.has_master else data.detach()
        self.tensor = torch.nn.Parameter(master)
        self._take_by_view = grads.dtype == self.tensor.dtype
        if self._take_by_view:
            self.tensor.grad = grads
        self._versions: list[int] = []  # of parameters when the float32 copy was the same
        self.note_writes()
        self.is_part, self.is_late = is_part, is_part and is_whole
        note_shown(self, grads)

    @property
    def is_seen_by_scalers(self) -> bool:
        """Not a copy, which may be of a step that was skipped."""
        return self._take_by_view

    def take_grad(self, is_new: bool = True) -> None:
        """Gives the optimizer the reduced gradients: a view of them where the type is its own, else a copy.

        A copy of gradients that are not ``is_new`` is kept. What was written to them since counts, as in
        :meth:`take_writes`, and so does another ``.grad``, or none.
        """
        grads: torch.Tensor | None = self._grads
        if self._shown is not None:
            grads = self._shown.grad
            if grads is not None and grads.data_ptr() == self._grads.data_ptr():
                grads = self._grads  # else somebody has put another there
        if grads is None:  # of a parameter that no rank has used, under the policy "skip"
            self.tensor.grad = self.copied = None
        elif self._take_by_view:
            self.tensor.grad = grads
        elif is_new or grads is not self.copied or self.tensor.grad is None:
            self.tensor.grad, self.copied = grads.to(self.tensor.dtype), grads
            self.note_grad_writes()
        elif self._copied_versions != self._grad_versions():
            _take_changed(self.tensor.grad, grads)
            self.note_grad_writes()

    def note_grad_writes(self) -> None:
        """The copy and the gradients are the same now."""
        self._copied_versions = self._grad_versions()

    def _grad_versions(self) -> list[int]:
        parameters = [piece.parameter for piece in self.pieces]
        seen = [tensor for one in parameters for tensor in (one.main_grad, one.grad) if tensor is not None]
        return [tensor._version for tensor in seen]

    @property
    def has_view(self) -> bool:
        """What it has taken is what scalers have seen."""
        return self.tensor.grad is self._grads

    def scale_copy(self, factor: float | torch.Tensor) -> None:
        """``main_grad`` was multiplied: so is a copy that was taken of it."""
        if self.tensor.grad is not None and self.copied is self._grads:
            self.tensor.grad.mul_(factor)

    def drop_grad(self) -> None:
        """Releases a copy; a view is there for scalers, which come to it before it is taken.

        Not one that was converted with the model, of which the next backward tells.
        """
        self.copied = None
        is_view = self._take_by_view and self._grads.dtype == self.tensor.dtype
        self.tensor.grad = self._grads if is_view and self._grads.device == self.tensor.device else None

    def note_writes(self) -> None:
        """The float32 copy and the model are the same now."""
        if self.has_master:
            self._versions = [piece.parameter._version for piece in self.pieces]

    def take_writes(self) -> None:
        """What was written to the model's parameters since, by ``load_state_dict`` or in place, counts: the float32 copy
        takes elements of which it is not the longer form. Writes to ``.data`` are not seen."""
        if not self.has_master or self._versions == [piece.parameter._version for piece in self.pieces]:
            return
        _take_changed(self.tensor.detach(), self._data)
        self.note_writes()

    def hold_frozen(self, state: Mapping[Any, Any]) -> None:
        """Before a step, which would move parameters that were frozen since (by their last gradient, weight decay or
        momentum): the optimizer passes over one that is whole. In a flat tensor it keeps them, and what the optimizer
        has of their elements, for :meth:`release_frozen`; the optimizer counts on there, as on all other ranks that have
        parts of them."""
        self._held = []
        frozen = [piece for piece in self.pieces if not piece.parameter.requires_grad]
        if not frozen or self._shown is not None:  # a missing ``grad`` says so
            return
        if self.is_whole:
            self.tensor.grad = None
            return
        self._state = state
        known = state.get(self.tensor, {})
        for key, value in [(None, self.tensor.detach()), *known.items()]:
            if isinstance(value, torch.Tensor) and value.shape == self.tensor.shape:
                self._held += [(key, piece, piece.of(value).clone()) for piece in frozen]
        if not known:  # their state begins in this step, and weight decay would be in it
            for piece in frozen:
                piece.of(self.tensor.detach()).zero_()

    def release_frozen(self) -> None:
        """After the step, also after one that raised."""
        for key, piece, value in self._held:
            piece.put(self.tensor.detach() if key is None else self._state[self.tensor][key], value)
        self._held = []

    def publish(self) -> None:
        """Brings what the optimizer has made of the float32 copy to the model."""
        self.release_frozen()
        if self.has_master:
            self._data.copy_(self.tensor.detach())

    def reload(self, values: Mapping[torch.Tensor, torch.Tensor] | None = None) -> None:
        """Takes the float32 copy from the model anew, or from what ``values`` has for each parameter."""
        if not self.has_master:
            return
        if values is None:
            self.tensor.detach().copy_(self._data)
            return
        for piece in self.pieces:
            value = values[piece.parameter].detach().reshape(-1)
            piece.put(self.tensor.detach(), value[piece.begin : piece.begin + piece.numel])


class GradShard:
    """This rank's part of reduced gradients, for optimizers that get whole ones only when they step: what is measured,
    clipped and scaled before that. ``tensor`` is there for its ``grad``."""

    is_late = False

    def __init__(self, group: int, pieces: list[Piece], grads: torch.Tensor, is_expert: bool, is_part: bool) -> None:
        self.group = group
        self.pieces = pieces
        self.is_expert = is_expert
        self.padding = _padding_of(pieces, grads)
        self.tensor = torch.nn.Parameter(grads)
        self.tensor.grad = grads
        # torch's scaler refuses the others, on ranks that have some.
        self.is_seen_by_scalers = self.has_view = grads.dtype != torch.float16
        self.is_part = is_part
        note_shown(self, grads)


def give_back(runs: Sequence[Run | GradShard]) -> None:
    """What was done to copies of gradients counts for these, too, in as many digits as they have."""
    for run in runs:
        if isinstance(run, Run) and run.copied is not None and run.tensor.grad is not None:
            run.copied.copy_(run.tensor.grad)
            run.note_grad_writes()


class Cut:
    """The parameters of a model that are in a param group, cut as their optimizer needs them."""

    def __init__(
        self,
        model: DistributedDataParallel,
        trainable: list[tuple[str, torch.Tensor]],
        group_of: dict[torch.Tensor, int],
    ) -> None:
        """``trainable``: with the names for the optimizer's state."""
        self._model = model
        self._trainable = trainable
        self._group_of = group_of
        self.buckets = model._reducer.buckets()

    def runs(self) -> Iterator[Run]:
        """For an elementwise optimizer, or where nothing is sharded."""
        for bucket in self.buckets:
            if bucket.parameters is None:
                yield from self.whole_runs(bucket, [index for index, _, _ in bucket.slots if self.is_wanted(index)])
                continue
            for group, pieces, first, last in self._spans(bucket):
                data = bucket.parameters[first:last].view(pieces[0].parameter.dtype)
                grads, is_part = bucket.grads[first:last], self._is_parted(bucket)
                yield Run(group, pieces, data, grads, bucket.is_expert, is_part=is_part)

    def whole_runs(self, bucket: _C.GradientBucket, indices: list[int]) -> Iterator[Run]:
        for index in indices:
            name, parameter = self._trainable[index]
            piece = Piece(name, parameter, 0, parameter.numel(), 0)
            shown = None if grad_place(self._model._options) != "grad" else parameter
            data, grads = parameter.data, parameter.main_grad
            group, is_part = self._group_of[parameter], self._is_parted(bucket)
            yield Run(group, [piece], data, grads, bucket.is_expert, is_whole=True, shown=shown, is_part=is_part)

    def shards(self) -> Iterator[GradShard]:
        for bucket in self.buckets:
            for group, pieces, first, last in self._spans(bucket):
                yield GradShard(group, pieces, bucket.grads[first:last], bucket.is_expert, self._is_parted(bucket))

    def is_wanted(self, index: int) -> bool:
        return self._trainable[index][1] in self._group_of

    def process_group_of(self, bucket: _C.GradientBucket) -> dist.ProcessGroup:
        """Whose ranks have the parts of the bucket."""
        return (self._model.experts if bucket.is_expert else self._model.replicas).group

    def _is_parted(self, bucket: _C.GradientBucket) -> bool:
        """Whether several ranks have parts of its gradients."""
        return bucket.parameters is not None and self.process_group_of(bucket).size() > 1

    def _spans(self, bucket: _C.GradientBucket) -> Iterator[tuple[int, list[Piece], int, int]]:
        """Of this rank's part: neighbours that share a param group, with it and their range in the bucket."""
        group = self.process_group_of(bucket)
        size = bucket.grads.numel() // group.size()
        begin, end = group.rank() * size, (group.rank() + 1) * size
        mine = [
            (index, offset, max(offset, begin), min(offset + numel, end))
            for index, offset, numel in sorted(bucket.slots, key=lambda slot: slot[1])
            if max(offset, begin) < min(offset + numel, end)
        ]

        def kind(slot: tuple[int, int, int, int]) -> tuple[int | None, torch.dtype]:
            parameter = self._trainable[slot[0]][1]
            return self._group_of.get(parameter), parameter.dtype  # several of 8 bits share a bucket

        for (wanted, _), slots in itertools.groupby(mine, key=kind):
            if wanted is None:
                continue
            parts = list(slots)
            first, last = parts[0][2], parts[-1][3]
            pieces = [
                Piece(*self._trainable[i], begin - offset, end - begin, begin - first)
                for i, offset, begin, end in parts
            ]
            yield wanted, pieces, first, last


def whole_runs_of(cuts: list[Cut]) -> tuple[list[Run], list[WholeParameters]]:
    """Over sharded models: the parameters that this rank updates as a whole, and how they come together."""
    exchanges: dict[dist.ProcessGroup, WholeParameters] = {}
    for cut in cuts:
        for bucket in cut.buckets:
            group = cut.process_group_of(bucket)
            exchanges.setdefault(group, WholeParameters(group)).add(bucket, cut.is_wanted)
    mine = {group: iter(exchange.settle()) for group, exchange in exchanges.items()}
    runs = [
        run
        for cut in cuts
        for bucket in cut.buckets
        for run in cut.whole_runs(bucket, next(mine[cut.process_group_of(bucket)]))
    ]
    return runs, list(exchanges.values())
