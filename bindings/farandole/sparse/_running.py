"""A forward of a model that is that of one batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any

from farandole.sparse._ahead_run import AheadRun
from farandole.sparse._comparisons import Comparisons
from farandole.sparse._in_flight import InFlight
from farandole.sparse._input_hooks import RecordedInputs, record_inputs
from farandole.sparse._sharded import is_sharded

if TYPE_CHECKING:
    from farandole.sparse._attachment import Attachment

Take = Callable[[InFlight, str], tuple[Any, Any]]

_OVERWRITTEN = (
    "buffers of {}, which runs ahead of forwards, are overwritten in a forward, when batches have gone ahead that needed "
    "them: expected DDP with broadcast_buffers=False, or that tells it to ignore them, where they differ between ranks"
)


class Running:
    """Inside, an attachment's modules take what came ahead for this batch; ``take`` gives the context and the data of a
    module. Not a generator of contextlib's, which makes twice the calls, in each step.

    Raises:
        RuntimeError: see PrefetchedRows.refuse(); or buffers of what runs ahead are overwritten inside.
    """

    __slots__ = ("_attachment", "_before", "_comparisons", "_flying", "_inner", "_recorded", "_take", "_whole")

    def __init__(self, attachment: Attachment, flying: InFlight, take: Take) -> None:
        self._attachment, self._flying, self._take = attachment, flying, take
        self._inner: contextlib.AbstractContextManager[Any] | None = None
        self._recorded: RecordedInputs | None = None  # in a forward that is not pipelined
        self._comparisons: Comparisons | None = None
        self._whole: AheadRun | None = None  # whose buffers are as it left them

    def __enter__(self) -> None:
        attachment, flying = self._attachment, self._flying
        attachment.prefetched.refuse(f"a forward of batch {flying.number}", flying)
        self._before = attachment.current, attachment.take
        attachment.current, attachment.take = flying, self._take
        try:
            if attachment.graph is None:
                self._inner = record_inputs(attachment.model, is_sharded, flying.batch)
                self._recorded = self._inner.__enter__()
            else:
                self._begin(attachment, flying)
        except BaseException:
            self._leave()
            raise

    def _begin(self, attachment: Attachment, flying: InFlight) -> None:
        self._comparisons = attachment.comparisons if flying.owner is attachment.input_dist else None
        attachment.compares = self._comparisons is not None and self._comparisons.begin(flying.batch)
        run = attachment.run
        if attachment.compares and run is not None and not run.is_overwritten():
            self._whole = run
        if flying.results:
            self._inner = attachment.replaying(flying.results)
            self._inner.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._inner is not None:
                self._inner.__exit__(kind, error, traceback)
            if error is None:
                self._end(self._attachment)
        finally:
            self._leave()

    def _end(self, attachment: Attachment) -> None:
        if self._recorded is not None:
            attachment.graph = self._recorded
            return
        if attachment.run is not None:
            attachment.run.note_forward()
        if self._whole is not None and self._whole.is_overwritten():
            raise RuntimeError(_OVERWRITTEN.format(", ".join(map(repr, self._whole.modules))))
        if self._comparisons is not None:
            self._comparisons.end(attachment.compares)

    def _leave(self) -> None:
        self._attachment.current, self._attachment.take = self._before
        self._attachment.prefetched.forget(self._flying)
