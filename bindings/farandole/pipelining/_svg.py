"""Steps as an SVG picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from farandole import _C
from farandole.pipelining._captions import Steps, bytes_text, captions, named, seconds_text
from farandole.pipelining._memory import MemoryCurve, memory_over_time
from farandole.pipelining._rows import COMMUNICATION, COMPUTE_KINDS, Box, Rows, rows_of

_COLOURS = {
    "F": (122, 174, 236),
    "B": (130, 199, 130),
    "I": (112, 201, 193),
    "W": (242, 176, 98),
    "OVERLAP_F_B": (188, 154, 224),
    COMMUNICATION: (150, 155, 165),
}
_IDLE = "#eceef1"
_INK = "#20262e"
_FAINT = "#7a818c"
_LIGHTEST = 0.55  # how far a rank's last stage is from its first one's colour to white

_FONT = 10.0  # pixels, as all sizes
_LETTER = 6.2  # the width of one, roughly
_LINE = 16.0
_BAR = 18.0
_LANE = 5.0
_CURVE = 24.0
_GAP = 3.0  # below each step of a rank
_RANK_GAP = 8.0
_MARGIN = 10.0


def draw_svg(steps: Steps, *, memory: Sequence[Sequence[float]] | None = None, width: int = 1200) -> str:
    """A picture of one or several steps, as the text of an SVG file.

    For each rank: its compute actions, coloured by kind and the paler the later a stage of the rank; below them
    communication (messages from when they are sent to when they arrive where the step is simulated, else the calls);
    and with ``memory`` the bytes held. Idle time is grey. Every box tells its action and times when pointed at.

    Args:
        steps: a step, or {"predicted": ..., "measured": ...}, drawn on one time scale, one above the other for each
            rank. The caption has the others' differences to the first.
        memory: per stage, as in :func:`memory_over_time`.
        width: of the picture, in pixels.
    """
    shown = named(steps)
    curves = {name: None if memory is None else memory_over_time(step, memory) for name, step in shown.items()}
    picture = _Picture(shown, width)
    rows = {name: rows_of(step) for name, step in shown.items()}
    picture.caption({kind for ranks in rows.values() for rank in ranks for kind in _kinds(rank)})
    most = max((curve.peak for one in curves.values() for curve in one or ()), default=0.0)
    for rank in range(max(len(step.ranks) for step in shown.values())):
        for name, step in shown.items():
            if rank < len(step.ranks):
                picture.rank(f"rank {rank} {name}".rstrip(), rows[name][rank], step.makespan)
                held = curves[name]
                if held is not None:
                    picture.memory(held[rank], step.makespan, most)
                picture.y += _GAP
        picture.y += _RANK_GAP
    picture.axis()
    return picture.text()


class _Picture:
    """Grows downwards from ``y``."""

    def __init__(self, steps: Mapping[str, _C.SimulationResult], width: int) -> None:
        self._steps = steps
        self._width = float(width)
        ranks = max(len(step.ranks) for step in steps.values())
        longest_label = max(len(f"rank {ranks - 1} {name}") for name in steps)
        self._left = 2 * _MARGIN + _LETTER * max(longest_label, len("peak 123.4 MB"))
        self._seconds = max(step.makespan for step in steps.values())
        across = max(1.0, self._width - self._left - _MARGIN)
        self._scale = across / self._seconds if self._seconds > 0 else 0.0  # pixels per second
        self._root = ElementTree.Element("svg", xmlns="http://www.w3.org/2000/svg")
        self._root.set("font-family", "sans-serif")
        self._root.set("font-size", _number(_FONT))
        self._paper = self._add("rect", x=0, y=0, width=self._width, fill="white")
        self.y = _MARGIN

    def caption(self, kinds: set[str]) -> None:
        for line in captions(self._steps):
            self._write(_MARGIN, self.y + _FONT, line, fill=_INK)
            self.y += _LINE
        x = _MARGIN
        for kind in (*COMPUTE_KINDS, COMMUNICATION, "idle"):
            if kind in kinds or kind == "idle":
                fill = _IDLE if kind == "idle" else _colour(kind, 0, 1)
                self._add("rect", x=x, y=self.y, width=_FONT, height=_FONT, fill=fill)
                self._write(x + 1.4 * _FONT, self.y + 0.9 * _FONT, kind, fill=_INK)
                x += 2.4 * _FONT + _LETTER * len(kind)
        self.y += _LINE + _GAP

    def rank(self, label: str, rows: Rows, makespan: float) -> None:
        self._write(_MARGIN, self.y + 0.7 * _BAR, label, fill=_INK)
        self._box("idle", 0.0, makespan, _BAR, _IDLE)
        for box in rows.compute:
            self._action(box, rows.num_chunks, _BAR)
        self.y += _BAR + 1
        for lane in rows.lanes:
            for box in lane:
                self._action(box, 1, _LANE - 1)
            self.y += _LANE

    def memory(self, curve: MemoryCurve, makespan: float, most: float) -> None:
        """``most``: the bytes that are drawn as high as there is room."""
        bottom = self.y + _CURVE
        height = _CURVE / most if most > 0 else 0.0
        path = f"M{_number(self._left)} {_number(bottom)}"
        for time, held in curve.points:
            path += f"H{_number(self._x(time))}V{_number(bottom - held * height)}"
        path += f"H{_number(self._x(makespan))}V{_number(bottom)}Z"
        self._add("path", {"class": "memory"}, d=path, fill="#f3d6d6", stroke="#b86a6a")
        self._write(_MARGIN, self.y + 0.6 * _CURVE, f"peak {bytes_text(curve.peak)}", fill=_FAINT)
        self.y = bottom

    def axis(self) -> None:
        top = self.y
        for tick in _ticks(self._seconds):
            x = self._x(tick)
            self._add("line", x1=x, y1=top, x2=x, y2=top + 4, stroke=_FAINT)
            self._write(x, top + 5 + _FONT, seconds_text(tick), fill=_FAINT, anchor="middle")
        self.y += 5 + _LINE + _MARGIN

    def text(self) -> str:
        for element in (self._root, self._paper):
            element.set("height", _number(self.y))
        self._root.set("width", _number(self._width))
        self._root.set("viewBox", f"0 0 {_number(self._width)} {_number(self.y)}")
        ElementTree.indent(self._root, " ")
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"

    def _action(self, box: Box, num_chunks: int, height: float) -> None:
        rect = self._box(box.kind, box.start, box.end, height, _colour(box.kind, box.chunk, num_chunks))
        title = ElementTree.SubElement(rect, "title")
        shown = box.name if box.kind in COMPUTE_KINDS else box.label
        title.text = f"{shown}: {seconds_text(box.start)} + {seconds_text(box.end - box.start)}"
        room = (box.end - box.start) * self._scale
        if height < _FONT:
            return
        for label in (box.label, box.label[1:]):  # "F12", else "12"
            if _LETTER * len(label) < room:
                middle = self._x((box.start + box.end) / 2)
                self._write(middle, self.y + 0.7 * _BAR, label, fill=_INK, anchor="middle")
                return

    def _box(self, kind: str, start: float, end: float, height: float, fill: str) -> ElementTree.Element:
        x = self._x(start)
        rect = self._add("rect", {"class": kind}, x=x, y=self.y, width=self._x(end) - x, height=height, fill=fill)
        if kind in COMPUTE_KINDS:
            rect.set("stroke", "white")
            rect.set("stroke-width", "0.5")
        return rect

    def _write(self, x: float, y: float, text: str, *, fill: str, anchor: str = "start") -> None:
        element = self._add("text", {"text-anchor": anchor, "pointer-events": "none"}, x=x, y=y, fill=fill)
        element.text = text

    def _add(self, tag: str, attributes: dict[str, str] | None = None, **numbers: Any) -> ElementTree.Element:
        texts = {name: one if isinstance(one, str) else _number(one) for name, one in numbers.items()}
        return ElementTree.SubElement(self._root, tag, (attributes or {}) | texts)

    def _x(self, seconds: float) -> float:
        return self._left + seconds * self._scale


def _kinds(rows: Rows) -> set[str]:
    return {box.kind for lane in (rows.compute, *rows.lanes) for box in lane}


def _colour(kind: str, chunk: int, num_chunks: int) -> str:
    paler = _LIGHTEST * chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    return "#" + "".join(f"{round(part + paler * (255 - part)):02x}" for part in _COLOURS[kind])


def _ticks(seconds: float) -> list[float]:
    """Round times from 0 to ``seconds``, at most eleven."""
    if seconds <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(seconds / 10))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor * 10 >= seconds)
    return [index * step for index in range(int(seconds / step * (1 + 1e-9)) + 1)]


def _number(value: float) -> str:
    """Hundredths of a pixel, as short as it goes."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text
