"""Where parameters' gradients lie: in words, and as an SVG picture."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from xml.etree import ElementTree

import torch

from farandole._paper import FAINT, FONT, LETTER, LINE, MARGIN, Paper, explain, number_text, ticks

if TYPE_CHECKING:
    from farandole.ddp._tuning import BucketTuner
    from farandole.ddp._wrapper import DistributedDataParallel

# Modules, in turn; the second and later parameters of one are paler.
_COLOURS = [(122, 174, 236), (130, 199, 130), (242, 176, 98), (188, 154, 224), (112, 201, 193), (232, 150, 150)]
_PALER = 0.4  # how far they are from their module's colour to white
_PADDING = "#b4b9c2"
_MINE, _OTHERS = "#20262e", "#d3d8df"
_BAR = 18.0  # pixels, as all sizes
_SHARDS = 5.0
_GAP = 6.0
_BUFFER_GAP = 10.0


@dataclass(frozen=True)
class Span:
    """One parameter's elements [begin, end) of a buffer."""

    name: str
    shape: torch.Size
    begin: int
    end: int


@dataclass(frozen=True)
class LaidBucket:
    """Elements [begin, end) of a buffer, in the order of which ``spans`` are. The rest is padding."""

    index: int
    buffer: int
    kind: str  # of the buffer: its types, and whether it is experts'
    begin: int
    end: int
    spans: list[Span]
    ranks: int  # 1, or among how many each has its part
    rank: int

    @property
    def padding(self) -> int:
        return self.end - self.begin - sum(span.end - span.begin for span in self.spans)

    def part(self, rank: int) -> tuple[int, int]:
        """What a rank has of it."""
        size = (self.end - self.begin) // self.ranks
        return self.begin + rank * size, self.begin + (rank + 1) * size


class ShowsLayout:
    """The part of the wrapper that shows its buckets."""

    _tuner: BucketTuner | None

    def bucket_layout(self) -> str:
        """One line per bucket: buffer, range in elements, padding, this rank's part, parameters with theirs."""
        return layout_text(buckets_of(cast("DistributedDataParallel", self)))

    def draw_bucket_layout(self, *, width: int = 1200) -> str:
        """The same as a picture, ``width`` pixels wide: the text of an SVG file. Boxes tell more when pointed at."""
        return layout_svg(buckets_of(cast("DistributedDataParallel", self)), width)

    def bucket_tuning(self) -> str | None:
        """Which bucket size was chosen and why; None before that, and without ``bucket_size="auto"``."""
        return self._tuner.reason if self._tuner is not None else None


def buckets_of(model: DistributedDataParallel) -> list[LaidBucket]:
    """By index, that is in the order in which they are issued at first."""
    parameters = list(model._trainable.items())
    buffers: dict[int, int] = {}
    laid = []
    for index, bucket in enumerate(model._reducer.buckets()):
        grads = bucket.grads
        buffer = buffers.setdefault(grads.untyped_storage().data_ptr(), len(buffers))
        begin = grads.storage_offset()
        dtype = parameters[bucket.slots[0][0]][1].dtype
        kind = f"{_name_of(dtype)}{', gradients in ' + _name_of(grads.dtype) if grads.dtype != dtype else ''}"
        group = (model.experts if bucket.is_expert else model.replicas).group
        is_sharded = bucket.parameters is not None
        spans = [
            Span(parameters[i][0], parameters[i][1].shape, begin + offset, begin + offset + numel)
            for i, offset, numel in sorted(bucket.slots, key=lambda slot: slot[1])
        ]
        laid.append(
            LaidBucket(
                index,
                buffer,
                kind + (", experts" if bucket.is_expert else ""),
                begin,
                begin + grads.numel(),
                spans,
                group.size() if is_sharded else 1,
                group.rank() if is_sharded else 0,
            )
        )
    return laid


def layout_text(buckets: list[LaidBucket]) -> str:
    """A line for each bucket."""
    lines = []
    for bucket in buckets:
        line = f"bucket {bucket.index}: buffer {bucket.buffer} ({bucket.kind}) [{bucket.begin}, {bucket.end})"
        if bucket.padding > 0:
            line += f", {bucket.padding} of padding"
        if bucket.ranks > 1:
            begin, end = bucket.part(bucket.rank)
            line += f", this rank's part [{begin}, {end})"
        lines.append(line + ": " + " ".join(f"{span.name} [{span.begin}, {span.end})" for span in bucket.spans) + "\n")
    return "".join(lines)


def layout_svg(buckets: list[LaidBucket], width: int) -> str:
    """A row for each bucket, buffer by buffer, all on one scale."""
    picture = _Picture(buckets, width)
    for buffer in range(max((bucket.buffer for bucket in buckets), default=-1) + 1):
        inside = sorted((one for one in buckets if one.buffer == buffer), key=lambda bucket: bucket.begin)
        picture.buffer(inside)
        for bucket in inside:
            picture.bucket(bucket)
    picture.axis()
    return picture.text()


class _Picture(Paper):
    def __init__(self, buckets: list[LaidBucket], width: int) -> None:
        super().__init__(width)
        self._left = 2 * MARGIN + LETTER * max((len(_label(bucket)) for bucket in buckets), default=0)
        self._most = max((bucket.end - bucket.begin for bucket in buckets), default=0)
        self._scale = max(1.0, self.width - self._left - MARGIN) / max(1, self._most)  # pixels for an element
        self._colours: dict[str, str] = {}
        modules: dict[str, list[str]] = {}
        for bucket in buckets:
            for span in bucket.spans:
                modules.setdefault(span.name.rpartition(".")[0], []).append(span.name)
        for index, names in enumerate(modules.values()):
            self._colours |= {name: _colour(index, name != names[0]) for name in names}
        self._legend(any(bucket.padding for bucket in buckets), any(bucket.ranks > 1 for bucket in buckets))

    def buffer(self, buckets: list[LaidBucket]) -> None:
        first = buckets[0]
        parameters = sum(len(bucket.spans) for bucket in buckets)
        text = (
            f"buffer {first.buffer}: {first.kind}; {buckets[-1].end} elements in {_count(len(buckets), 'bucket')} of "
        )
        text += _count(parameters, "parameter")
        padding = sum(bucket.padding for bucket in buckets)
        if padding > 0:
            text += f"; {padding} of padding ({100 * padding / buckets[-1].end:.1f}%)"
        self.write(MARGIN, self.y + FONT, text)
        self.y += LINE + 2

    def bucket(self, bucket: LaidBucket) -> None:
        self.write(MARGIN, self.y + 0.7 * _BAR, _label(bucket))
        whole = self._box("bucket", bucket, bucket.begin, bucket.end, _BAR, _PADDING)
        explain(whole, f"bucket {bucket.index} [{bucket.begin}, {bucket.end}): {bucket.padding} of padding")
        for span in bucket.spans:
            rect = self._box("parameter", bucket, span.begin, span.end, _BAR, self._colours[span.name])
            rect.set("stroke", "white")
            rect.set("stroke-width", "0.5")
            shape = "x".join(map(str, span.shape)) or "scalar"
            explain(rect, f"{span.name} [{span.begin}, {span.end}): {shape}")
            room = (span.end - span.begin) * self._scale
            for label in (span.name, span.name.rpartition(".")[2]):
                if LETTER * len(label) < room:
                    middle = self._x(bucket, (span.begin + span.end) / 2)
                    self.write(middle, self.y + 0.7 * _BAR, label, anchor="middle")
                    break
        self.y += _BAR + 1
        if bucket.ranks > 1:
            for rank in range(bucket.ranks):
                begin, end = bucket.part(rank)
                mine = rank == bucket.rank
                rect = self._box("mine" if mine else "part", bucket, begin, end, _SHARDS, _MINE if mine else _OTHERS)
                rect.set("stroke", "white")
                rect.set("stroke-width", "0.5")
                explain(rect, f"rank {rank} of the group has [{begin}, {end})")
            self.y += _SHARDS + 1
        self.y += _GAP

    def axis(self) -> None:
        for tick in ticks(self._most):
            x = self._left + tick * self._scale
            self.add("line", x1=x, y1=self.y, x2=x, y2=self.y + 4, stroke=FAINT)
            self.write(x, self.y + 5 + FONT, _elements(tick), fill=FAINT, anchor="middle")
        self.y += 5 + LINE + MARGIN

    def _legend(self, has_padding: bool, has_parts: bool) -> None:
        x = MARGIN
        for text, fill, is_shown in (
            ("padding", _PADDING, has_padding),
            ("this rank's part", _MINE, has_parts),
            ("other ranks' parts", _OTHERS, has_parts),
        ):
            if is_shown:
                self.add("rect", x=x, y=self.y, width=FONT, height=FONT, fill=fill)
                self.write(x + 1.4 * FONT, self.y + 0.9 * FONT, text)
                x += 2.4 * FONT + LETTER * len(text)
        if x > MARGIN:
            self.y += LINE + _BUFFER_GAP

    def _box(
        self, shown: str, bucket: LaidBucket, begin: float, end: float, height: float, fill: str
    ) -> ElementTree.Element:
        x = self._x(bucket, begin)
        width = self._x(bucket, end) - x
        return self.add("rect", {"class": shown}, x=x, y=self.y, width=width, height=height, fill=fill)

    def _x(self, bucket: LaidBucket, element: float) -> float:
        return self._left + (element - bucket.begin) * self._scale


def _label(bucket: LaidBucket) -> str:
    return f"bucket {bucket.index}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _elements(count: float) -> str:
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= scale:
            return f"{number_text(count / scale)} {unit}"
    return number_text(count)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _colour(module: int, is_later: bool) -> str:
    paler = _PALER if is_later else 0.0
    return "#" + "".join(f"{round(part + paler * (255 - part)):02x}" for part in _COLOURS[module % len(_COLOURS)])
