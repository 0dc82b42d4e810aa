"""What a chart shows, without how it is drawn: the page (SVG) and the pictures (matplotlib) draw the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sparrow.tracking.report.metrics import Series

Kind = Literal["lines", "stack", "bars", "timeline"]
Style = Literal["line", "thin", "dots"]

# Colours by role; colour-blind-safe (Okabe and Ito, 2008). page.css has them for a light and a dark page.
INK, BLUE, RED, GREEN, PINK, ORANGE, SKY, VIOLET, GREY = "ink", "c0", "c1", "c2", "c3", "c4", "c5", "c6", "grey"
CYCLE = (BLUE, RED, GREEN, PINK, ORANGE, SKY, VIOLET, GREY)
# The middle of viridis, where both white and black paper leave contrast.
SHADES = 10


@dataclass(frozen=True)
class Line:
    """`band`: where steps are put together, their range is drawn too. `named`: it is in the legend."""

    label: str
    series: Series
    color: str = BLUE
    style: Style = "line"
    band: bool = False
    named: bool = True


@dataclass(frozen=True)
class Chart:
    """Lines over a common axis; `key` names it in file names and links.

    Attributes:
        bounds: of the vertical axis, their powers of ten where it is logarithmic; None takes those of the data.
        mark: a horizontal line at a value, with its label.
        log: logarithmic vertical axis; values up to 0 are left out.
        over: what the horizontal axis is.
    """

    key: str
    title: str
    lines: Sequence[Line]
    note: str = ""
    kind: Kind = "lines"
    bounds: tuple[float | None, float | None] = (None, None)
    mark: tuple[float, str] | None = None
    log: bool = False
    over: str = "step"

    @property
    def empty(self) -> bool:
        return not any(len(line.series) for line in self.lines)

    @property
    def span(self) -> tuple[int, int]:
        """First and last place on the horizontal axis."""
        filled = [line.series.steps_N for line in self.lines if len(line.series)]
        return min((int(at_N[0]) for at_N in filled), default=0), max((int(at_N[-1]) for at_N in filled), default=0)


def shade(order: int, count: int) -> str:
    """The colour of one of `count` ordered lines."""
    return f"s{order * (SHADES - 1) // max(count - 1, 1)}"
