"""Steps as an SVG picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree import ElementTree

from farandole import _C
from farandole._paper import EMPTY, FAINT, FONT, LETTER, LINE, MARGIN, Paper, explain, number_text, ticks
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
_LIGHTEST = 0.55  # how far a rank's last stage is from its first one's colour to white

_BAR = 18.0  # pixels, as all sizes
_LANE = 5.0
_CURVE = 24.0
_GAP = 3.0  # below each step of a rank
_RANK_GAP = 8.0


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


class _Picture(Paper):
    def __init__(self, steps: Mapping[str, _C.SimulationResult], width: int) -> None:
        super().__init__(width)
        self._steps = steps
        ranks = max(len(step.ranks) for step in steps.values())
        longest_label = max(len(f"rank {ranks - 1} {name}") for name in steps)
        self._left = 2 * MARGIN + LETTER * max(longest_label, len("peak 123.4 MB"))
        self._seconds = max(step.makespan for step in steps.values())
        across = max(1.0, self.width - self._left - MARGIN)
        self._scale = across / self._seconds if self._seconds > 0 else 0.0  # pixels per second

    def caption(self, kinds: set[str]) -> None:
        for line in captions(self._steps):
            self.write(MARGIN, self.y + FONT, line)
            self.y += LINE
        x = MARGIN
        for kind in (*COMPUTE_KINDS, COMMUNICATION, "idle"):
            if kind in kinds or kind == "idle":
                fill = EMPTY if kind == "idle" else _colour(kind, 0, 1)
                self.add("rect", x=x, y=self.y, width=FONT, height=FONT, fill=fill)
                self.write(x + 1.4 * FONT, self.y + 0.9 * FONT, kind)
                x += 2.4 * FONT + LETTER * len(kind)
        self.y += LINE + _GAP

    def rank(self, label: str, rows: Rows, makespan: float) -> None:
        self.write(MARGIN, self.y + 0.7 * _BAR, label)
        self._box("idle", 0.0, makespan, _BAR, EMPTY)
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
        path = f"M{number_text(self._left)} {number_text(bottom)}"
        for time, held in curve.points:
            path += f"H{number_text(self._x(time))}V{number_text(bottom - held * height)}"
        path += f"H{number_text(self._x(makespan))}V{number_text(bottom)}Z"
        self.add("path", {"class": "memory"}, d=path, fill="#f3d6d6", stroke="#b86a6a")
        self.write(MARGIN, self.y + 0.6 * _CURVE, f"peak {bytes_text(curve.peak)}", fill=FAINT)
        self.y = bottom

    def axis(self) -> None:
        top = self.y
        for tick in ticks(self._seconds):
            x = self._x(tick)
            self.add("line", x1=x, y1=top, x2=x, y2=top + 4, stroke=FAINT)
            self.write(x, top + 5 + FONT, seconds_text(tick), fill=FAINT, anchor="middle")
        self.y += 5 + LINE + MARGIN

    def _action(self, box: Box, num_chunks: int, height: float) -> None:
        rect = self._box(box.kind, box.start, box.end, height, _colour(box.kind, box.chunk, num_chunks))
        shown = box.name if box.kind in COMPUTE_KINDS else box.label
        explain(rect, f"{shown}: {seconds_text(box.start)} + {seconds_text(box.end - box.start)}")
        room = (box.end - box.start) * self._scale
        if height < FONT:
            return
        for label in (box.label, box.label[1:]):  # "F12", else "12"
            if LETTER * len(label) < room:
                middle = self._x((box.start + box.end) / 2)
                self.write(middle, self.y + 0.7 * _BAR, label, anchor="middle")
                return

    def _box(self, kind: str, start: float, end: float, height: float, fill: str) -> ElementTree.Element:
        x = self._x(start)
        rect = self.add("rect", {"class": kind}, x=x, y=self.y, width=self._x(end) - x, height=height, fill=fill)
        if kind in COMPUTE_KINDS:
            rect.set("stroke", "white")
            rect.set("stroke-width", "0.5")
        return rect

    def _x(self, seconds: float) -> float:
        return self._left + seconds * self._scale


def _kinds(rows: Rows) -> set[str]:
    return {box.kind for lane in (rows.compute, *rows.lanes) for box in lane}


def _colour(kind: str, chunk: int, num_chunks: int) -> str:
    paler = _LIGHTEST * chunk / (num_chunks - 1) if num_chunks > 1 else 0.0
    return "#" + "".join(f"{round(part + paler * (255 - part)):02x}" for part in _COLOURS[kind])
