"""A chart as inline SVG, and the numbers that its hover read-out needs.

Colours are classes, for the style sheet has those of a light and of a dark page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparrow.tracking.report.axis import Axis, step_axis, value_axis
from sparrow.tracking.report.chart import Chart, Line
from sparrow.tracking.report.reduce import COLUMNS, Columns, aligned, reduce
from sparrow.tracking.report.text import escaped, number

WIDTH, HEIGHT = 460, 230
LEFT, RIGHT, TOP, BOTTOM = 50, 444, 10, 196
# Of a timeline: height of a row, and room for its name.
ROW, NAMES = 22, 80
MOST_NAME = 18


def figure(chart: Chart, data: list[Any], columns: int = COLUMNS) -> str:
    """The `<figure>` of a chart; its numbers are appended to `data`, where page.js finds them by their index."""
    lines = list(chart.lines)
    first, last = chart.span
    series = [line.series for line in lines]
    reduced = [reduce(s, first, last, columns) for s in (aligned(series) if chart.kind == "stack" else series)]
    body, bottom = _timeline(lines, first, last, columns) if chart.kind == "timeline" else _plot(chart, lines, reduced)
    index = len(data)
    data.append(_numbers(chart, lines, reduced))
    legend = "" if chart.kind == "timeline" else _legend(chart)
    note = " ".join(filter(None, [escaped(chart.note), _reduction(chart, reduced), _lost(lines)]))
    return (
        f'<figure id="{chart.key}-{index}"><figcaption><h3>{escaped(chart.title)}</h3>{legend}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {bottom + HEIGHT - BOTTOM}" role="img" tabindex="0" data-chart="{index}" '
        f'aria-label="{escaped(_spoken(chart, lines))}">{body}'
        f'<line class="cursor" y1="{TOP}" y2="{bottom}" x1="-9" x2="-9"/></svg><p class="note">{note}</p></figure>'
    )


def _plot(chart: Chart, lines: Sequence[Line], reduced: Sequence[Columns]) -> tuple[str, int]:
    mark = [np.array([chart.mark[0]])] if chart.mark else []
    pairs = list(zip(lines, reduced, strict=True))
    shown = [c.low_C if line.band else c.mean_C for line, c in pairs]
    shown += [c.high_C for line, c in pairs if line.band]
    if chart.kind == "stack":
        shown = [sum((c.mean_C for c in reduced), start=np.zeros(1))]
    y = value_axis([*shown, *mark], chart.bounds, chart.log, BOTTOM, TOP)
    x = step_axis(*chart.span, LEFT, RIGHT)
    if chart.kind == "bars":
        x = Axis(chart.span[0] - 0.6, chart.span[1] + 0.6, LEFT, RIGHT)
    parts = [_grid(x, y, chart.over)]
    if chart.kind == "stack":
        parts += _areas(lines, reduced, x, y)
    elif chart.kind == "bars":
        parts += [_bars(lines[0], reduced[0], x, y)]
    else:
        parts += [_band(line, c, x, y) for line, c in pairs if line.band and c.most > 1]
        parts += [_path(line, c, x, y) for line, c in pairs]
    if chart.mark:
        at = float(y.place(np.array(chart.mark[0])))
        parts.append(f'<line class="mark" x1="{LEFT}" x2="{RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
    return "".join(parts), BOTTOM


def _grid(x: Axis, y: Axis, over: str) -> str:
    rows = [
        f'<line class="rule" x1="{LEFT}" x2="{RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text class="end" x="{LEFT - 6}" y="{at + 4:.1f}">{label}</text>'
        for at, label in y.ticks(5)
        if TOP - 3 <= at <= BOTTOM + 3
    ]
    return "".join(rows) + _step_labels(x, over, BOTTOM)


def _step_labels(x: Axis, over: str, bottom: int) -> str:
    whole = [(at, label) for at, label in x.ticks(6) if "." not in label or label[-1] in "kM"]
    labels = [f'<text class="mid" x="{at:.1f}" y="{bottom + 16}">{label}</text>' for at, label in whole]
    return "".join(labels) + f'<text class="end" x="{RIGHT}" y="{bottom + 31}">{escaped(over)}</text>'


def _points(x_C: np.ndarray, y_C: np.ndarray) -> list[str]:
    return [f"{x:.1f} {y:.1f}" for x, y in zip(x_C.tolist(), y_C.tolist(), strict=True)]


def _runs(kept_C: np.ndarray) -> list[slice]:
    """The stretches of columns that have a place; a line breaks between them."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], kept_C.astype(np.int8), [0]])))
    return [slice(start, end) for start, end in edges.reshape(-1, 2).tolist()]


def _path(line: Line, columns: Columns, x: Axis, y: Axis) -> str:
    x_C, y_C = x.place(columns.x_C), y.place(columns.mean_C)
    kept_C = np.isfinite(y_C)
    # A stretch of one point is a line of no length, which a round cap shows as a dot.
    paths = ["M" + "L".join(_points(x_C[run], y_C[run])) + ("h0" if run.stop - run.start == 1 else "")
             for run in _runs(kept_C)]  # fmt: skip
    drawn = f'<path class="l {line.color} {line.style}" d="{"".join(paths)}"/>'
    if line.style != "dots" or len(x_C) > 100:
        return drawn
    dots = "".join(f"M{point}h0" for point in _points(x_C[kept_C], y_C[kept_C]))
    return drawn + f'<path class="l {line.color} dot" d="{dots}"/>'


def _band(line: Line, columns: Columns, x: Axis, y: Axis) -> str:
    x_C, low_C, high_C = x.place(columns.x_C), y.place(columns.low_C), y.place(columns.high_C)
    areas = [
        "M" + "L".join([*_points(x_C[run], high_C[run]), *_points(x_C[run][::-1], low_C[run][::-1])]) + "Z"
        for run in _runs(np.isfinite(low_C) & np.isfinite(high_C))
    ]
    return f'<path class="band {line.color}" d="{"".join(areas)}"/>'


def _areas(lines: Sequence[Line], reduced: Sequence[Columns], x: Axis, y: Axis) -> list[str]:
    """Each on top of those before it, in steps: a slope would lend a step's time to its neighbours."""
    x_C = reduced[0].x_C
    middle_D = (x_C[1:] + x_C[:-1]) / 2
    edge_E = np.clip(x.place(np.concatenate([[x_C[0] - 0.5], middle_D, [x_C[-1] + 0.5]])), LEFT, RIGHT)
    corner_F = np.repeat(edge_E, 2)[1:-1]
    parts, below_C = [], np.zeros(len(x_C))
    for line, columns in zip(lines, reduced, strict=True):
        above_C = below_C + columns.mean_C
        high_F, low_F = np.repeat(y.place(above_C), 2), np.repeat(y.place(below_C), 2)
        outline = [*_points(corner_F, high_F), *_points(corner_F[::-1], low_F[::-1])]
        parts.append(f'<path class="area {line.color}" d="M{"L".join(outline)}Z"/>')
        below_C = above_C
    return parts


def _bars(line: Line, columns: Columns, x: Axis, y: Axis) -> str:
    width = 0.8 * (RIGHT - LEFT) / (x.high - x.low)
    top_C = np.where(np.isfinite(y.place(columns.mean_C)), y.place(columns.mean_C), BOTTOM)
    bars = [
        f"M{at - width / 2:.1f} {BOTTOM}V{min(top, BOTTOM):.1f}h{width:.1f}V{BOTTOM}Z"
        for at, top in zip(x.place(columns.x_C).tolist(), top_C.tolist(), strict=True)
    ]
    return f'<path class="area {line.color}" d="{"".join(bars)}"/>'


def _timeline(lines: Sequence[Line], first: int, last: int, columns: int) -> tuple[str, int]:
    """A row for each line; where columns hold several steps, one raised step fills its column."""
    x = Axis(first - 0.5, last + 0.5, LEFT + NAMES, RIGHT)
    width = max((RIGHT - LEFT - NAMES) / min(columns, last - first + 1), 1.5)
    parts = []
    for row, line in enumerate(lines):
        found, top = reduce(line.series, first, last, columns), TOP + row * ROW
        raised = x.place(found.x_C[found.high_C > 0]).tolist()
        blocks = "".join(f"M{at - width / 2:.1f} {top + 3}h{width:.1f}v{ROW - 6}h-{width:.1f}Z" for at in raised)
        name = escaped(line.label[:MOST_NAME])
        parts.append(f'<text class="end" x="{LEFT + NAMES - 8}" y="{top + ROW / 2 + 4}">{name}</text>')
        parts.append(f'<line class="rule" x1="{LEFT + NAMES}" x2="{RIGHT}" y1="{top + ROW}" y2="{top + ROW}"/>')
        parts.append(f'<path class="area {line.color}" d="{blocks}"/>')
    bottom = TOP + ROW * len(lines)
    return "".join(parts) + _step_labels(x, "step", bottom), bottom


def _legend(chart: Chart) -> str:
    entries = [f'<span class="{line.color}">{escaped(line.label)}</span>' for line in chart.lines
               if line.named and len(line.series)]  # fmt: skip
    if chart.mark:
        entries.append(f'<span class="mark">{escaped(chart.mark[1])}</span>')
    return f'<div class="legend">{"".join(entries)}</div>'


def _reduction(chart: Chart, reduced: Sequence[Columns]) -> str:
    most = max((c.most for c in reduced), default=1)
    if most == 1:
        return ""
    if chart.kind == "timeline":
        return f"Each column is up to {most} steps, filled if one of them was raised."
    band = "; the band is their lowest to highest" if any(line.band for line in chart.lines) else ""
    return f"Each point is the mean of up to {most} steps{band}."


def _lost(lines: Sequence[Line]) -> str:
    lost = sum(len(line.series) - len(line.series.finite_M) for line in lines)
    words = "1 value is" if lost == 1 else f"{lost} values are"
    return f'<b class="bad">{words} not finite, and left out.</b>' if lost else ""


def _spoken(chart: Chart, lines: Sequence[Line]) -> str:
    """What a screen reader says of the chart."""
    last = [f"{line.label} {number(line.series.last)}" for line in lines if line.named and len(line.series)]
    return f"{chart.title}. Last values: {', '.join(last)}. Arrow keys read the steps."


def _numbers(chart: Chart, lines: Sequence[Line], reduced: Sequence[Columns]) -> dict[str, Any]:
    """Places and values for the read-out."""
    first, last = chart.span
    # As the axes of _plot and _timeline have it.
    air = {"timeline": 0.5, "bars": 0.6}.get(chart.kind, 1.0 if first == last else 0.0)
    left = LEFT + NAMES if chart.kind == "timeline" else LEFT
    series = []
    for line, columns in zip(lines, reduced, strict=True):
        value_C = columns.high_C if chart.kind == "timeline" else columns.mean_C
        entry: dict[str, Any] = {"n": line.label, "c": line.color, "x": _rounded(columns.x_C, 7)}
        entry["v"] = _rounded(value_C, 4)
        if line.band and columns.most > 1:
            entry |= {"lo": _rounded(columns.low_C, 3), "hi": _rounded(columns.high_C, 3)}
        series.append(entry)
    most = max((columns.most for columns in reduced), default=1)
    over = f"{chart.over}, around" if most > 1 else chart.over
    return {"over": over, "left": left, "right": RIGHT, "low": first - air, "high": last + air, "s": series}


def _rounded(value_C: np.ndarray, digits: int) -> list[float | None]:
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in value_C.tolist()]
