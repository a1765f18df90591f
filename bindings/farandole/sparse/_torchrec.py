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
        self._features = features
        self._has_one_stride = not features.variable_stride_per_key()
        self.group = group
        self.splits: list[list[int]] = features.dist_splits(all_to_all._splits)  # by tensor and rank
        self._tensors: list[torch.Tensor] = features.dist_tensors()
        labels = features.dist_labels()
        self.form = form_of(*[(label, each.dtype) for label, each in zip(labels, self._tensors, strict=True)])
        self.output_splits: list[list[int]] = []
        self._stride_per_rank: list[int] | None = None

    def rows(self) -> list[list[int]]:
        """What is sent to each rank: the form of the features, how many samples, and how much of each tensor it gets."""
        samples = self._features.stride() if self._has_one_stride else 0
        none = [0] * (len(TENSORS) - len(self.splits))
        return [[self.form, samples, *sizes, *none] for sizes in zip(*self.splits, strict=True)]

    def settle(self, rows: list[list[int]]) -> None:
        """Takes what each rank has said in these columns, all of the same form."""
        _, samples, *sizes = map(list, zip(*rows, strict=True))
        self.output_splits = sizes[: len(self.splits)]
        self._stride_per_rank = samples if self._has_one_stride else None

    def arguments(self) -> dict[str, Any]:
        """Those of KJTAllToAllTensorsAwaitable."""
        splits, rank = self.all_to_all._splits, self.group.rank()
        begin = sum(splits[:rank])
        return {
            "pg": self.group,
            "input": self._features,
            "splits": splits,
            "input_splits": self.splits,
            "output_splits": self.output_splits,
            "input_tensors": [tensor.contiguous() for tensor in self._tensors],
            "labels": self._features.dist_labels(),
            "keys": self._features.keys()[begin : begin + splits[rank]],
            "device": self._features.device(),
            "stagger": self.all_to_all._stagger,
            "stride_per_rank": self._stride_per_rank,
        }

    def _wait_impl(self) -> Any:
        return KJTAllToAll.forward(self.all_to_all, self._features).wait()


class ExchangedTensors(KJTAllToAllTensorsAwaitable):
    """The data of one module's features, in an exchange that is not torchrec's."""

    def __init__(
        self,
        group: ExchangeGroup,
        exchange: TensorExchange,
        tensors: slice,
        pg: dist.ProcessGroup,
        input: KeyedJaggedTensor,
        splits: list[int],
        input_splits: list[list[int]],
        output_splits: list[list[int]],
        input_tensors: list[torch.Tensor],
        labels: list[str],
        keys: list[str],
        device: torch.device,
        stagger: int,
        stride_per_rank: list[int] | None,
    ) -> None:
        Awaitable.__init__(self)  # not the base's, which starts exchanges
        self._group, self._exchange, self._tensors = group, exchange, tensors
        self._pg, self._device, self._workers = pg, device, pg.size()
        self._input, self._keys, self._splits, self._stagger = input, keys, splits, stagger
        self._input_splits = dict(zip(labels, input_splits, strict=True))
        self._output_splits = dict(zip(labels, output_splits, strict=True))
        self._stride_per_rank = stride_per_rank
        self._recat = _get_recat(splits[pg.rank()], len(splits), stagger, device, stride_per_rank)
        self._awaitables: list[Any] = []

    def _wait_impl(self) -> KeyedJaggedTensor:
        self._output_tensors = self._group.finish_tensors(self._exchange)[self._tensors]
        return super()._wait_impl()


def send(parts: Sequence[UnsentSplits], group: ExchangeGroup) -> dict[int, KJTAllToAllTensorsAwaitable]:
    """Starts the exchange of the data of settled parts, over one group; by their identity."""
    arguments = [part.arguments() for part in parts]
    tensors = [tensor for each in arguments for tensor in each["input_tensors"]]
    if not tensors or group.size == 1 or group.device.type != "cpu":
        made = [KJTAllToAllTensorsAwaitable(**each) for each in arguments]
        return {id(part): each for part, each in zip(parts, made, strict=True)}
    sent = [split for part in parts for split in part.splits]
    received = [split for part in parts for split in part.output_splits]
    exchange = group.start_tensors(tensors, sent, received)
    exchanged: dict[int, KJTAllToAllTensorsAwaitable] = {}
    begin = 0
    for part, each in zip(parts, arguments, strict=True):
        end = begin + len(each["input_tensors"])
        exchanged[id(part)] = ExchangedTensors(group, exchange, slice(begin, end), **each)
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
