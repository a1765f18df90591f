"""input_dist of all pipelined modules of a model, ahead of the forward that uses it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from farandole._C import Presence
from farandole.sparse._exchange import SplitsExchange
from farandole.sparse._in_flight import InFlight
from farandole.sparse._sharded import is_torchrec
from farandole.sparse._verdict import Inputs


class InputDist:
    """Starts and finishes the input_dist of one batch after the other, in the same order on all ranks.

    The splits of torchrec's modules go round together, with who has the batch. Other modules, and what torchrec
    exchanges over groups of other ranks, follow when all ranks are known to have it.

    Args:
        group: all ranks that train together; used by nobody else, since it may be called by another thread. None is
            this rank alone.
        device: where the inputs are.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group = group
        self._exchange = SplitsExchange(group, device)
        self._modules: dict[str, nn.Module] = {}
        self._inputs: Callable[[InFlight], Inputs] | None = None
        self._torchrec: Any = None
        self._held: dict[str, Any] = {}
        self._has_begun = False
        self._may_run_beside = True
        self._decided: Presence | None = None  # where no exchange is outstanding
        self._late: dict[str, tuple[Any, dict[str, Any]]] = {}  # inputs of modules that start in finish()
        self._unsent: list[Any] = []

    def take(self, modules: dict[str, nn.Module], inputs: Callable[[InFlight], Inputs], may_run_beside: bool) -> None:
        """From the next batch on: the pipelined modules by name, and what a batch gives them, in the same order;
        whether that may be computed beside a forward."""
        self._modules, self._inputs, self._may_run_beside = modules, inputs, may_run_beside
        if any(is_torchrec(module) for module in modules.values()):
            self._torchrec = importlib.import_module("farandole.sparse._torchrec")

    def may_run_beside(self, is_promised: bool) -> bool:
        """Not before it has been through the modules: until then forwards use the same groups. Nor where modules
        exchange over groups of their own, unless it is promised that no forward uses them."""
        if not (self._has_begun and self._may_run_beside):
            return False
        return is_promised or all(
            name in self._held and all(map(self._is_ours, self._held[name].groups)) for name in self._modules
        )

    def start(self, flying: InFlight | None, presence: Presence, reason: str) -> None:
        error: Exception | None = None
        calls: dict[str, tuple[Any, dict[str, Any]]] = {}
        self._late, self._unsent = {}, []
        if flying is not None and self._inputs is not None:
            try:
                calls = self._calls(flying, self._inputs)
                if self._has_begun:
                    self._hold(flying, calls)
            except Exception as raised:
                error = raised
                presence, reason = Presence.FAILED, f"{type(raised).__name__}: {raised}"
        if self._has_begun:
            rows = self._rows() if presence == Presence.BATCH else None
            self._decided = None
            self._exchange.post(presence, rows, reason)
        else:
            self._begin(flying, calls, presence, reason)
        if error is not None:
            raise error

    def finish(self, flying: InFlight | None) -> bool:
        """False at the end of the data on some rank."""
        if self._decided is not None:
            return self._decided != Presence.END_OF_DATA
        said, rows = self._exchange.wait()
        if said == Presence.BATCH and flying is not None:
            self._send(flying, rows)
            flying.is_sent = True
        return said != Presence.END_OF_DATA

    def release(self) -> None:
        """The modules are as they were before."""
        for held in self._held.values():
            held.release()
        self._held.clear()

    def _calls(self, flying: InFlight, inputs_of: Callable[[InFlight], Inputs]) -> dict[str, Any]:
        with torch.no_grad():
            inputs = inputs_of(flying)
            flying.calls = dict(zip(self._modules, inputs.calls, strict=True))
            calls = dict(flying.calls)
            for name, module in self._modules.items():
                if hasattr(module, "preprocess_input"):  # torchrec's, for feature processors
                    args, kwargs = calls[name]
                    calls[name] = module.preprocess_input(list(args), kwargs)
        flying.owner = self
        return calls

    # torchrec's modules make their input_dist from the first batch that they see.
    def _begin(self, flying: InFlight | None, calls: dict[str, Any], presence: Presence, reason: str) -> None:
        self._decided = Presence.FAILED
        self._decided = self._exchange.agree(presence, reason)
        if self._decided != Presence.BATCH or flying is None or self._inputs is None:
            return
        for name, (args, kwargs) in calls.items():
            self._dist_alone(flying, name, args, kwargs)
        flying.is_sent = True
        for name, module in self._modules.items():
            if is_torchrec(module):
                held = self._torchrec.HeldSplits(module, self._over)
                if held.groups:
                    self._held[name] = held
        # A rank that has no second batch takes part in the exchange of it.
        self._hold(InFlight(flying.number, flying.batch), calls)
        self._exchange.expect(sum(part.columns for part in self._unsent))
        self._late, self._unsent = {}, []
        self._has_begun = True

    # The group of the exchange in place of another one of the same ranks, which others use at the same time.
    def _over(self, group: dist.ProcessGroup) -> dist.ProcessGroup:
        if self._group is None or dist.get_process_group_ranks(group) != dist.get_process_group_ranks(self._group):
            return group
        return self._group

    def _hold(self, flying: InFlight, calls: dict[str, Any]) -> None:
        for name, (args, kwargs) in calls.items():
            if name not in self._held:
                self._late[name] = args, kwargs
                continue
            module: Any = self._modules[name]
            with torch.no_grad():
                context = module.create_context()
                request = module.input_dist(context, *args, **kwargs)
            flying.contexts[name], flying.requests[name] = context, request
            self._unsent += [part for part in self._torchrec.unsent_of(request) if self._is_ours(part.group)]

    def _is_ours(self, group: dist.ProcessGroup) -> bool:
        return self._group is None or group is self._group

    def _rows(self) -> list[list[int]]:
        return [
            [column for part in self._unsent for column in part.columns_for(rank)]
            for rank in range(self._exchange.size)
        ]

    def _send(self, flying: InFlight, rows: list[list[int]]) -> None:
        if self._torchrec is not None:
            self._send_unsent(flying, rows)
        for name, (args, kwargs) in self._late.items():
            self._dist_alone(flying, name, args, kwargs)

    def _send_unsent(self, flying: InFlight, rows: list[list[int]]) -> None:
        begin = 0
        with torch.no_grad():
            for part in self._unsent:
                end = begin + part.columns
                part.settle([row[begin:end] for row in rows])
                begin = end
            data = self._torchrec.send(self._unsent)
            for name, request in flying.requests.items():
                flying.requests[name] = self._torchrec.sent(request, data)
        self._unsent = []

    def _dist_alone(self, flying: InFlight, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        module: Any = self._modules[name]
        with torch.no_grad():
            context = module.create_context()
            flying.contexts[name] = context
            flying.requests[name] = module.input_dist(context, *args, **kwargs).wait()
