"""What the pipelines of one model share: its forwards with the inputs that came ahead."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from farandole.sparse._agreement import agreed, findings, refuse_unattachable, strict_on, untraced_on
from farandole.sparse._ahead_run import AheadRun
from farandole.sparse._attributes_ahead import AttributesAhead
from farandole.sparse._comparisons import Comparisons
from farandole.sparse._draws_ahead import DrawsAhead
from farandole.sparse._exchanged_again import ExchangedAgain
from farandole.sparse._in_flight import InFlight
from farandole.sparse._input_dist import InputDist
from farandole.sparse._input_equality import is_equal_input
from farandole.sparse._input_graph import InputGraph, trace_inputs
from farandole.sparse._input_hooks import RecordedInputs
from farandole.sparse._input_writes import InputWrites
from farandole.sparse._kernels import refuse_dense_sequences
from farandole.sparse._model_changes import ModelChanges
from farandole.sparse._other_inputs import CUSTOM_FORWARD, refuse_other_inputs
from farandole.sparse._post_processing import Noted, PostProcessing
from farandole.sparse._prefetched_rows import PrefetchedRows
from farandole.sparse._running import Take
from farandole.sparse._sharded import is_sharded, sharded_modules, unwrap
from farandole.sparse._tracer import CannotTrace
from farandole.sparse._untraced import UntracedForward
from farandole.sparse._verdict import Inputs, Verdict


class Attachment:
    """The model's sharded modules take what an input_dist has brought, while ``Running`` a batch; else they are as ever.

    Args:
        tracing: "fx" finds what a batch gives the sharded modules in a graph of the model; "hooks" in the forward of
            the first batch, which is not pipelined; None takes hooks where fx cannot trace the model, and warns.
        example: a batch with ``to_proxy()`` for fx.

    Other ranks may find other things, in a forward that is not the same: what one of them cannot pipeline, none does.
    To be made on all ranks.

    Raises:
        ValueError: the model has no sharded module; with ``strict``, on any rank, one that cannot be pipelined.
        CannotTrace: from fx, with what it stopped at, on any rank.
    """

    def __init__(
        self,
        model: nn.Module,
        group: dist.ProcessGroup | None,
        device: torch.device,
        strict: bool,
        tracing: str | None,
        example: Any,
    ) -> None:
        self.model, _ = unwrap(model)
        graph, failed = None, None
        try:
            _refuse_modules(self.model, device)
            graph = None if tracing == "hooks" else trace_inputs(self.model, is_sharded, example)
        except Exception as error:  # which other ranks, whose model or forward may be another one, are to be told
            failed = error
        self.asked = (group, device, tracing)
        self.input_dist = InputDist(group, device)
        rank, found = self.input_dist.agree(findings(tracing, strict, graph, failed))
        refuse_unattachable(found, failed)
        failed = None  # which has this frame
        # Why fx has left it to hooks, and whether it had to on some ranks only.
        self.untraced, self.is_untraced_on_some = untraced_on(found, rank)
        if self.untraced:
            text = f"inputs of sharded modules are found by hooks in the first batch\n{self.untraced}"
            warnings.warn(text, stacklevel=4)
            graph = None
        self.verdicts: tuple[Verdict, ...] | None = None  # until inputs are known
        self._is_strict = strict  # on this rank
        self._strict = strict_on(found)  # on any
        self._asks_strict: bool | None = None  # another pipeline, which the ranks are to agree on
        self.graph: InputGraph | RecordedInputs | None = None if graph is None else agreed(graph, found)
        self.attributes = AttributesAhead(self.model, () if self.graph is None else self.graph.attributes)
        self.current: InFlight | None = None
        self.take: Take | None = None
        self._post_processing: PostProcessing | None = None
        self._written: frozenset[str] | None = None  # by post-processing
        self.run: AheadRun | None = None  # the last one
        self._draws = DrawsAhead(device)
        self._changes = ModelChanges(self.model, is_sharded)
        self.comparisons: Comparisons | None = None
        self.compares = False  # values, in this forward
        self.exchanged_again = ExchangedAgain()
        self.prefetched = PrefetchedRows()
        self._users = 0
        self._forwards: dict[str, Callable[..., Any]] = {}
        self._instance_forwards: dict[str, dict[str, Any]] = {}  # of those that had one before
        self._replaced: dict[str, nn.Module] = {}

    @property
    def sharded(self) -> dict[str, nn.Module]:
        """By name: all that there are."""
        return sharded_modules(self.model, is_sharded)

    @property
    def pipelined(self) -> dict[str, nn.Module]:
        """Those whose input goes ahead."""
        return dict(self._replaced)

    @property
    def has_recorded(self) -> bool:
        """By hooks, in a forward that was not pipelined."""
        return isinstance(self.graph, RecordedInputs)

    def use(self, model: nn.Module) -> None:
        """One more pipeline, of the model in these wrappers."""
        self._users += 1
        self.attributes.note_wrappers(model)

    def be_strict(self, strict: bool) -> None:
        """Where any of its pipelines asks for it, on any rank: ``prepare()`` tells the others."""
        self._asks_strict = self._asks_strict or strict

    def prepare(self) -> None:
        """Between two batches: puts the forwards in as soon as inputs are known.

        Raises:
            RuntimeError: the model has changed since.
            ValueError: with ``strict``, on any rank, a sharded module cannot be pipelined.
        """
        if self._asks_strict is not None and not self.input_dist.is_lost:
            self._agree_on_strict()
        if self.verdicts is None and self.graph is not None and not self.input_dist.is_lost:
            if isinstance(self.graph, RecordedInputs):
                self._agree(self.graph)
            self._settle(self.graph)
        if self._changes.refuse(self._forwards) and self.comparisons is not None:
            self.comparisons.forget()

    def begin_forward(self, flying: InFlight) -> bool:
        """Of each batch, before another one goes ahead; whether there is something for adopt() to do."""
        self.input_dist.changes_ahead.next_turn()
        if flying.in_forward:
            self.exchanged_again.note_in_forward()
            return bool(self._changes.processing)  # which run for it before they do for the next one
        run = flying.run
        is_ours = flying.owner is self.input_dist
        if run is not None:
            is_ours = is_ours or run.modules == self._changes.processing
            is_ours = is_ours and flying.is_training == self.model.training and not run.is_stale()
        is_adopted = is_ours and (flying.read is None or not flying.read.changed())
        if is_adopted and self.input_dist.in_forward.in_a_row > 0:
            self.input_dist.in_forward.was_right()
        return not is_adopted

    def adopt(self, flying: InFlight, patience: float) -> None:
        """Before another batch goes ahead: makes anew what went ahead for this one in another mode of the model, with
        attributes or through modules that were changed since, or by another attachment. Other ranks may be later by
        ``patience``.

        Raises:
            RuntimeError: it cannot be taken back, or caches hold rows for it; or other ranks have seen no change.
        """
        modules = self._changes.processing
        run = flying.run
        is_same = ({} if run is None else run.modules) == modules
        attributes = [] if flying.read is None else flying.read.changed()
        is_other_mode = run is not None and flying.is_training != self.model.training
        changed = [*modules] if run is not None and (is_other_mode or run.is_stale()) else []
        change = _change_of([*attributes, *changed] or [*modules], run is not None, flying.number)
        if run is not None or attributes:
            self.prefetched.refuse(f"{change},")
        if run is not None and (why := run.take_back()) and is_same:
            raise RuntimeError(_not_taken_back(flying, why, [*modules], attributes))
        was_sent = is_same and flying.owner is self.input_dist
        flying.owner, flying.results, flying.run, flying.read = None, None, None, None
        flying.is_training = self.model.training
        inputs = self._inputs_of(flying) if modules or was_sent else []
        is_other = is_other_mode or not is_equal_input([*flying.calls.values()], inputs)
        if was_sent and self.input_dist.changes_ahead.gives_others(change, is_other, self.model, patience):
            in_forward = self.input_dist.in_forward.was_exchanged_again()
            self.exchanged_again.note(flying.number, changed, attributes, is_other_mode, in_forward)
        elif was_sent:
            self.input_dist.in_forward.was_right()
            flying.owner = self.input_dist

    def leave(self) -> None:
        self._users -= 1
        if self._users > 0:
            return
        for name, module in self._replaced.items():
            if module.__dict__.get("forward") is self._forwards[name]:
                del module.forward
                module.__dict__.update(self._instance_forwards.get(name, {}))
        _mark(self._replaced.values(), False)
        self.input_dist.release()
        if self._post_processing is not None:
            self._post_processing.close()
        self._forwards.clear()
        self._replaced.clear()
        _attachments.pop(self.model, None)

    def replaying(self, results: Noted) -> contextlib.AbstractContextManager[None]:
        """Inside, modules return what they have returned ahead."""
        assert self._post_processing is not None
        return self._post_processing.replaying(results, self.compares)

    # All ranks have run that forward, or none: who fails in one alone ends all.
    def _agree(self, graph: RecordedInputs) -> None:
        _, found = self.input_dist.agree(findings("hooks", self._is_strict, graph), after_steps=True)
        self._strict = strict_on(found)
        self.graph = agreed(graph, found)

    def _agree_on_strict(self) -> None:
        asked, self._asks_strict = bool(self._asks_strict), None
        _, found = self.input_dist.agree(findings(None, asked))
        strict = strict_on(found)
        if strict is not None:
            self._refuse_unpipelined(self.verdicts or (), strict)
            self._is_strict, self._strict = self._is_strict or asked, strict

    def _settle(self, graph: InputGraph | RecordedInputs) -> None:
        self._refuse_unpipelined(graph.verdicts, self._strict)
        modules = {name: self.model.get_submodule(name) for name in graph.names}
        # Buffers and generators are a forward's as well, at any time.
        self.input_dist.take(modules, self._inputs_of, may_run_beside=not graph.post_processing)
        for name, module in modules.items():
            self._replace(name, module, self._sharded_forward(name, module))
        _mark(modules.values(), True)
        self._changes.watch(graph.post_processing, graph.attributes)
        self._post_processing = PostProcessing(self.model, graph.post_processing, graph.read_elsewhere)
        self._forwards.update(self._post_processing.forwards)
        if not isinstance(graph, RecordedInputs):
            self.comparisons = Comparisons(self.model, graph.names, graph.attributes)
        self.verdicts = graph.verdicts

    def _inputs_of(self, flying: InFlight) -> Inputs:
        assert self.graph is not None and self._post_processing is not None
        modules = self._changes.processing
        if not modules:
            return self._computed(self.graph, flying)
        run = AheadRun(modules, self._written, self._post_processing.calls_made, self.run)
        with self._draws.looked_for(modules, self.model.training, self._strict is not None):
            with self._post_processing.noting() as flying.results:
                inputs = self._computed(self.graph, flying)
            self._written = run.has_run()
            flying.run = self.run = run
        return inputs

    def _computed(self, graph: InputGraph | RecordedInputs, flying: InFlight) -> Inputs:
        try:
            flying.read = self.attributes.read()
            inputs, sources = graph.run(flying.batch)
            flying.source_writes = InputWrites(sources, may_be_others=True) if sources else None
            return inputs
        except (AttributeError, LookupError, TypeError) as error:
            if not flying.has_custom_forward or isinstance(graph, RecordedInputs):
                raise
            raise TypeError(
                f"inputs of sharded modules cannot be computed from a batch, which is a {type(flying.batch).__name__}: "
                f"{error}. {CUSTOM_FORWARD}"
            ) from error

    # fx takes what a forward asks of a batch (is it None, say) for settled once; hooks have seen one batch.
    def _verify(self, name: str, flying: InFlight, now: tuple[Any, Any]) -> None:
        is_recorded = isinstance(self.graph, RecordedInputs)
        changed = list if self.comparisons is None else self.comparisons.changed
        refuse_other_inputs(name, flying, now, self.compares, is_recorded, changed)

    def _refuse_unpipelined(self, verdicts: Iterable[Verdict], strict: str | None) -> None:
        text = "\n".join(str(verdict) for verdict in verdicts if not verdict.pipelined)
        if text and strict is not None:
            raise ValueError(f"sharded modules cannot be pipelined{strict}\n{text}")
        if text:
            warnings.warn(f"sharded modules exchange their inputs in the forward\n{text}", stacklevel=6)

    def _replace(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> None:
        if "forward" in module.__dict__:
            self._instance_forwards[name] = {"forward": module.forward}
        self._forwards[name] = forward
        self._replaced[name] = module
        module.forward = forward

    def _sharded_forward(self, name: str, module: Any) -> Callable[..., Any]:
        original = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            flying = self.current
            self.prefetched.refuse(f"a forward of {name}", flying)
            if flying is None or flying.owner is not self.input_dist:  # or it is another attachment's
                if flying is not None:
                    flying.prefetched.discard(name)  # its own rows, for its own inputs
                    if flying.in_forward:
                        self.input_dist.refuse_other_keys(name, args, kwargs)
                _mark([module], False)
                try:
                    return original(*args, **kwargs)
                finally:
                    _mark([module], True)
            assert self.take is not None
            if name not in flying.contexts:
                raise RuntimeError(
                    f"{name} is called twice in a forward, or with a batch that did not come through the pipeline: its "
                    "input came ahead once"
                )
            ahead = self.take(flying, name)
            self._verify(name, flying, (args, kwargs))
            return module.compute_and_output_dist(*ahead)

        return UntracedForward(forward, original)  # what comes ahead is on streams of its own


def _refuse_modules(model: nn.Module, device: torch.device) -> None:
    sharded = sharded_modules(model, is_sharded)
    for name, module in sharded.items():
        refuse_dense_sequences(name, module, device)
    if not sharded:
        raise ValueError(
            f"{type(model).__name__} has no sharded module: expected torchrec's ShardedModule, or modules with "
            "create_context, input_dist and compute_and_output_dist; TrainPipelineBase takes any model"
        )


def _change_of(names: list[str], may_be_mode: bool, number: int) -> str:
    of = f"{', '.join(map(repr, names))}{', or of the mode,' if may_be_mode else ''}"
    return f"a change of {of} before the forward of batch {number}"


def _not_taken_back(flying: InFlight, why: str, modules: list[str], attributes: list[str]) -> str:
    through = ", ".join(map(repr, modules))
    if attributes:
        named = ", ".join(map(repr, attributes))
        before, remedy = f"with {named} as it was before", f"{named} not to be changed before that forward"
    else:
        before = f"in {'training' if flying.is_training else 'eval'} mode"
        remedy = "the mode of the model to be the same again for that forward"
    return f"batch {flying.number} has been through {through} {before}, ahead of its forward, and {why}, or {remedy}"


# torchrec's feature processors look at it.
def _mark(modules: Iterable[nn.Module], is_pipelined: bool) -> None:
    for module in modules:
        if hasattr(module, "is_pipelined"):
            module.is_pipelined = is_pipelined


_attachments: weakref.WeakKeyDictionary[nn.Module, Attachment] = weakref.WeakKeyDictionary()


def attach(
    model: nn.Module,
    group: dist.ProcessGroup | None,
    device: torch.device,
    strict: bool,
    tracing: str | None,
    example: Any,
) -> Attachment:
    """The attachment of a model, which all its pipelines share; ``leave()`` ends it. A collective of ``group``."""
    inner, _ = unwrap(model)
    attachment = _attachments.get(inner)
    if attachment is None:
        attachment = Attachment(model, group, device, strict, tracing, example)
        _attachments[inner] = attachment
    elif attachment.asked != (group, device, tracing):
        raise ValueError(
            f"{type(inner).__name__} has another pipeline, with another process_group, device or tracing: expected the "
            "same, since pipelines of one model share its forwards; detach() the other one first"
        )
    else:
        attachment.be_strict(strict)
    attachment.use(model)
    return attachment


__all__ = ["Attachment", "CannotTrace", "attach"]
