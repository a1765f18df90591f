"""torchrec's all-to-all of sparse features, with the splits of all modules in one exchange."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.dist_data import KJTAllToAll, KJTAllToAllTensorsAwaitable, _get_recat
from torchrec.distributed.embedding_sharding import (
    KJTListAwaitable,
    KJTListSplitsAwaitable,
    _set_sharding_context_intra_a2a,
)
from torchrec.distributed.types import Awaitable, NoWait
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from farandole._C import NoGrad, TensorExchange
from farandole.sparse._exchange_group import ExchangeGroup
from farandole.sparse._forms import TENSORS, form_of

Groups = Callable[[dist.ProcessGroup], dist.ProcessGroup]


class UnsentSplits(Awaitable[Any]):
    """What a pipelined module's ``KJTAllToAll`` gives: the splits, to be sent with those of other modules."""

    columns = 2 + len(TENSORS)  # that each rank gets, whatever the features are made of

    def __init__(self, all_to_all: KJTAllToAll, group: dist.ProcessGroup, features: KeyedJaggedTensor) -> None:
        super().__init__()
        self.all_to_all = all_to_all
        self.group = group
        self._features: KeyedJaggedTensor | None = features
        self.kind, self.device, self.labels = type(features), features.device(), features.dist_labels()
        self.has_one_stride = not features.variable_stride_per_key()
        self._samples = features.stride() if self.has_one_stride else 0
        splits, rank = all_to_all._splits, group.rank()
        begin = sum(splits[:rank])
        self.keys = features.keys()[begin : begin + splits[rank]]  # that come
        self.splits: list[list[int]] = features.dist_splits(splits)  # by tensor and rank
        self._tensors: list[torch.Tensor] = features.dist_tensors()
        self.form = form_of(*[(label, each.dtype) for label, each in zip(self.labels, self._tensors, strict=True)])
        self.output_splits: list[list[int]] = []
        self.stride_per_rank: list[int] | None = None

    def rows(self) -> list[list[int]]:
        """What is sent to each rank: the form of the features, how many samples, and how much of each tensor it gets."""
        none = [0] * (len(TENSORS) - len(self.splits))
        return [[self.form, self._samples, *sizes, *none] for sizes in zip(*self.splits, strict=True)]

    def settle(self, rows: list[list[int]]) -> None:
        """Takes what each rank has said in these columns, all of the same form."""
        _, samples, *sizes = map(list, zip(*rows, strict=True))
        self.output_splits = sizes[: len(self.splits)]
        self.stride_per_rank = samples if self.has_one_stride else None

    def tensors(self) -> list[torch.Tensor]:
        return [tensor.contiguous() for tensor in self._tensors]

    def forget_features(self) -> None:
        """Their tensors are packed."""
        self._features, self._tensors = None, []

    def send_alone(self) -> KJTAllToAllTensorsAwaitable:
        """As torchrec does."""
        return KJTAllToAllTensorsAwaitable(
            pg=self.group,
            input=self._features,
            splits=self.all_to_all._splits,
            input_splits=self.splits,
            output_splits=self.output_splits,
            input_tensors=self.tensors(),
            labels=self.labels,
            keys=self.keys,
            device=self.device,
            stagger=self.all_to_all._stagger,
            stride_per_rank=self.stride_per_rank,
        )

    def _wait_impl(self) -> Any:
        return KJTAllToAll.forward(self.all_to_all, self._features).wait()


class ExchangedTensors(KJTAllToAllTensorsAwaitable):
    """The data of one module's features, in an exchange that is not torchrec's."""

    def __init__(self, group: ExchangeGroup, exchange: TensorExchange, tensors: slice, part: UnsentSplits) -> None:
        Awaitable.__init__(self)  # not the base's, which starts exchanges
        self._group, self._exchange, self._tensors = group, exchange, tensors
        self._kind, self._keys, self._has_one_stride = part.kind, part.keys, part.has_one_stride
        splits, self._stagger = part.all_to_all._splits, part.all_to_all._stagger
        self._workers = part.group.size()
        # The names of what torchrec looks at.
        self._input_splits = dict(zip(part.labels, part.splits, strict=True))
        self._output_splits = dict(zip(part.labels, part.output_splits, strict=True))
        self._stride_per_rank = part.stride_per_rank
        self._recat = _get_recat(
            splits[part.group.rank()], len(splits), self._stagger, part.device, self._stride_per_rank
        )

    def _wait_impl(self) -> KeyedJaggedTensor:
        return self._kind.dist_init(
            keys=self._keys,
            tensors=self._group.finish_tensors(self._exchange)[self._tensors],
            variable_stride_per_key=not self._has_one_stride,
            num_workers=self._workers,
            recat=self._recat,
            stride_per_rank=self._stride_per_rank,
            stagger=self._stagger,
        )


def packed(parts: Sequence[UnsentSplits], group: ExchangeGroup) -> TensorExchange | None:
    """The exchange of the data of parts over one group, which need not stay as it is any longer; None where each part is
    sent alone."""
    if group.size == 1 or group.device.type != "cpu":
        return None
    tensors = [tensor for part in parts for tensor in part.tensors()]
    if not tensors:
        return None
    exchange = group.packed(tensors, [split for part in parts for split in part.splits])
    for part in parts:
        part.forget_features()
    return exchange


def send(
    parts: Sequence[UnsentSplits], group: ExchangeGroup, exchange: TensorExchange | None
) -> dict[int, KJTAllToAllTensorsAwaitable]:
    """Starts the exchange of the data of settled parts; by their identity."""
    if exchange is None:
        return {id(part): part.send_alone() for part in parts}
    group.start_tensors(exchange, [split for part in parts for split in part.output_splits])
    exchanged: dict[int, KJTAllToAllTensorsAwaitable] = {}
    begin = 0
    for part in parts:
        end = begin + len(part.labels)
        exchanged[id(part)] = ExchangedTensors(group, exchange, slice(begin, end), part)
        begin = end
    return exchanged


class HeldSplits:
    """Makes the ``KJTAllToAll`` of a module hold their splits back.

    Args:
        all_to_alls: those that its first input_dist has used, which a module may have anywhere.
        groups: the group to exchange over in place of the module's own.
    """

    def __init__(self, all_to_alls: Sequence[KJTAllToAll], groups: Groups) -> None:
        self._held = all_to_alls
        self.groups = [groups(part._pg) for part in self._held]
        self._forwards = [_holding(part, group) for part, group in zip(self._held, self.groups, strict=True)]
        for part, forward in zip(self._held, self._forwards, strict=True):
            part.forward = forward

    def release(self) -> None:
        for part, forward in zip(self._held, self._forwards, strict=True):
            if vars(part).get("forward") is forward:  # else another model has the same module, and a pipeline
                del part.forward


@contextlib.contextmanager
def holding_all(groups: Groups) -> Iterator[None]:
    """Inside, this thread's calls of any ``KJTAllToAll`` hold their splits back: those of modules that make theirs in
    their first input_dist."""
    thread, original = threading.get_ident(), KJTAllToAll.forward

    def forward(part: KJTAllToAll, input: KeyedJaggedTensor) -> Any:
        if threading.get_ident() != thread:
            return original(part, input)
        return _holding(part, groups(part._pg))(input)

    KJTAllToAll.forward = forward
    try:
        yield
    finally:
        KJTAllToAll.forward = original


def _holding(part: KJTAllToAll, group: dist.ProcessGroup) -> Callable[[KeyedJaggedTensor], UnsentSplits]:
    def hold(features: KeyedJaggedTensor) -> UnsentSplits:
        with NoGrad():
            return UnsentSplits(part, group, features)

    return hold


def unsent_of(request: Any) -> list[UnsentSplits]:
    """The splits that an input_dist holds back; none where it is not of that kind."""
    if not isinstance(request, KJTListSplitsAwaitable):
        return []
    return [part for part in request.awaitables if isinstance(part, UnsentSplits)]


def all_to_alls_of(request: Any) -> list[KJTAllToAll] | None:
    """What an input_dist holds back, of which there may be nothing (data-parallel tables); None where it exchanges in
    another way."""
    parts = unsent_of(request)
    if parts:
        return [part.all_to_all for part in parts]
    is_local = isinstance(request, KJTListSplitsAwaitable) and all(isinstance(p, NoWait) for p in request.awaitables)
    return [] if is_local else None


def sent(request: KJTListSplitsAwaitable, data: dict[int, KJTAllToAllTensorsAwaitable]) -> KJTListAwaitable:
    """The request whose held splits have become exchanges of data, by identity."""
    awaitables = [data[id(part)] if id(part) in data else part.wait() for part in request.awaitables]
    _set_sharding_context_intra_a2a(awaitables, request.ctx)
    return KJTListAwaitable(awaitables, request.ctx)
