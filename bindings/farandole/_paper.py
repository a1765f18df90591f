"""SVG pictures that grow downwards: what all of them are drawn with."""

from __future__ import annotations

import math
from typing import Any
from xml.etree import ElementTree

INK = "#20262e"
FAINT = "#7a818c"
EMPTY = "#eceef1"
FONT = 10.0  # pixels, as all sizes
LETTER = 6.2  # the width of one, roughly
LINE = 16.0
MARGIN = 10.0


class Paper:
    """White, of a width in pixels; as high as ``y`` is in the end."""

    def __init__(self, width: float) -> None:
        if not isinstance(width, (int, float)) or not width > 0:
            raise ValueError(f"width={width!r}: expected pixels, more than 0")
        self.width = float(width)
        self._root = ElementTree.Element("svg", xmlns="http://www.w3.org/2000/svg")
        self._root.set("font-family", "sans-serif")
        self._root.set("font-size", number_text(FONT))
        self._sheet = self.add("rect", x=0, y=0, width=self.width, fill="white")
        self.y = MARGIN

    def write(self, x: float, y: float, text: str, *, fill: str = INK, anchor: str = "start") -> None:
        element = self.add("text", {"text-anchor": anchor, "pointer-events": "none"}, x=x, y=y, fill=fill)
        element.text = text

    def add(self, tag: str, attributes: dict[str, str] | None = None, **numbers: Any) -> ElementTree.Element:
        texts = {name: one if isinstance(one, str) else number_text(one) for name, one in numbers.items()}
        return ElementTree.SubElement(self._root, tag, (attributes or {}) | texts)

    def text(self) -> str:
        """The SVG file."""
        for element in (self._root, self._sheet):
            element.set("height", number_text(self.y))
        self._root.set("width", number_text(self.width))
        self._root.set("viewBox", f"0 0 {number_text(self.width)} {number_text(self.y)}")
        ElementTree.indent(self._root, " ")
        return ElementTree.tostring(self._root, encoding="unicode") + "\n"


def explain(element: ElementTree.Element, text: str) -> None:
    """What it tells when pointed at."""
    ElementTree.SubElement(element, "title").text = text


def number_text(value: float) -> str:
    """Hundredths of a pixel, as short as it goes."""
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to ``most``, at most eleven."""
    if most <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(most / 10))
    step = next(power * factor for factor in (1, 2, 5, 10, 20) if power * factor * 10 >= most)
    return [index * step for index in range(int(most / step * (1 + 1e-9)) + 1)]
