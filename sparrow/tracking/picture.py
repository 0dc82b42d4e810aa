"""The charts of a run as PNG, for slides and for a look without a browser."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sparrow.tracking.report.axis import value_axis
from sparrow.tracking.report.chart import Chart, Line
from sparrow.tracking.report.metrics import Metrics, Series, read_metrics
from sparrow.tracking.report.panels import panels
from sparrow.tracking.report.reduce import Columns, aligned, reduce
from sparrow.tracking.report.text import visible
from sparrow.tracking.samples import shorten
from sparrow.whole_files import write_whole

# Those of page.css on light paper.
COLORS = {
    "ink": "#1b1f24", "grey": "#79838e", "c0": "#0072b2", "c1": "#c44e00", "c2": "#007a5a", "c3": "#b0568c",
    "c4": "#b37700", "c5": "#2b8cc4", "c6": "#5f4bb6", "s0": "#443983", "s1": "#3b518a", "s2": "#31668e",
    "s3": "#287a8e", "s4": "#208e8c", "s5": "#20a186", "s6": "#35b479", "s7": "#57b85f", "s8": "#77b84a",
    "s9": "#93b02e",
}  # fmt: skip
BLUE, ORANGE, RED, GREY = COLORS["c0"], COLORS["c4"], "#c0271d", COLORS["grey"]

# The picture of a run has the first nine of these that the run logs.
MAIN = (
    "reward",
    "tail",
    "budget",
    "read",
    "length",
    "time",
    "speedup",
    "kl",
    "entropy",
    "profile",
    "grad_norm",
    "ratio",
)
PANELS_ACROSS, MOST_PANELS = 3, 9
LEGEND_ACROSS, MOST_LABEL = 5, 40


def draw_run(metrics_jsonl: Path, png: Path, tau: float | None = None) -> None:
    """Draws the main charts of a run over the steps so far; a run of no steps gives an empty one.

    Args:
        metrics_jsonl: as `JsonlTracker` writes it; may still be growing.
        png: replaced at once when the new picture is complete.
        tau: P5 threshold to draw; None takes the last `acceptance/tau` of the run, if it has one.
    """
    metrics = read_metrics(metrics_jsonl)
    if tau is not None:
        metrics.series["acceptance/tau"] = Series(metrics.steps_N, np.full(len(metrics.steps_N), tau))
    draw_charts(main_charts(metrics), png)


def main_charts(metrics: Metrics) -> list[Chart]:
    """The charts of a run's picture; that of the reward even where it is empty."""
    charts = {chart.key: chart for chart in panels(metrics)}
    return [charts[key] for key in MAIN if not charts[key].empty][:MOST_PANELS] or [charts["reward"]]


def draw_charts(charts: Sequence[Chart], png: Path, dpi: int = 100) -> None:
    """Draws charts in rows of three into one PNG, which is replaced when it is complete."""
    across = min(len(charts), PANELS_ACROSS)
    rows = -(-len(charts) // across)
    size = (8.0, 4.5) if len(charts) == 1 else (5.4 * across, 3.6 * rows)
    figure = Figure(figsize=size, dpi=dpi, layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(rows, across, squeeze=False).flat
    for chart, axes in zip(charts, places, strict=False):
        _draw(axes, chart)
    for axes in places:
        axes.set_visible(False)
    write_whole(png, lambda part: figure.savefig(part, format="png"))


def _draw(axes: Axes, chart: Chart) -> None:
    entries = sum(line.named and len(line.series) > 0 for line in chart.lines) + (chart.mark is not None)
    axes.set_title(_plain(chart.title), loc="left", fontsize=11, pad=8 + 12 * -(-entries // LEGEND_ACROSS))
    axes.set_xlabel(chart.over)
    axes.grid(color=GREY, alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    if chart.empty:
        axes.text(0.5, 0.5, "no steps yet", ha="center", va="center", transform=axes.transAxes, color=GREY)
        return
    columns = _content(axes, chart)
    if chart.mark:
        axes.axhline(chart.mark[0], color=RED, ls="--", lw=1.2, label=chart.mark[1])
    if not chart.log and chart.kind != "stack":
        axes.set_ylim(*_limits(chart, columns))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    # Above the panel, where it hides no line.
    style: dict[str, Any] = {"frameon": False, "fontsize": 8, "handlelength": 1.5, "columnspacing": 1.2}
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, ncols=LEGEND_ACROSS, **style)


def _content(axes: Axes, chart: Chart) -> list[Columns]:
    """Draws the lines, and returns what they show."""
    if chart.log:
        axes.set_yscale("log")
    first, last = chart.span
    filled = [line for line in chart.lines if len(line.series)]
    series = [line.series for line in filled]
    columns = [reduce(found, first, last) for found in (aligned(series) if chart.kind == "stack" else series)]
    if chart.kind == "stack":
        _stack(axes, filled, columns)
    else:
        for line, found in zip(filled, columns, strict=True):
            _plot(axes, line, found)
    return columns


def _limits(chart: Chart, columns: Sequence[Columns]) -> tuple[float, float]:
    mark = [np.array([chart.mark[0]])] if chart.mark else []
    shown = [array for found in columns for array in (found.low_C, found.high_C)]
    axis = value_axis([*shown, *mark], chart.bounds, log=False, start=0, end=1)
    return axis.low, axis.high + 0.02 * (axis.high - axis.low)


def _plot(axes: Axes, line: Line, columns: Columns) -> None:
    color, thin = COLORS[line.color], line.style == "thin"
    # Few points, or some between gaps, are no line.
    marker = "o" if line.style == "dots" or len(columns.x_C) < 3 else None
    label = _plain(line.label) if line.named else None
    width = 1.0 if thin else 1.8
    axes.plot(
        columns.x_C,
        columns.mean_C,
        color=color,
        lw=width,
        alpha=0.7 if thin else 1.0,
        marker=marker,
        ms=3.5,
        label=label,
    )
    if line.band and columns.most > 1:
        axes.fill_between(columns.x_C, columns.low_C, columns.high_C, color=color, alpha=0.15, lw=0)


def _stack(axes: Axes, lines: Sequence[Line], columns: Sequence[Columns]) -> None:
    x_C, values = columns[0].x_C, np.stack([found.mean_C for found in columns])
    if len(x_C) == 1:  # one step has no width of its own
        x_C, values = np.array([x_C[0] - 0.5, x_C[0] + 0.5]), np.repeat(values, 2, axis=1)
    colors = [COLORS[line.color] for line in lines]
    labels = [_plain(line.label) for line in lines]
    axes.stackplot(x_C, values, colors=colors, labels=labels, alpha=0.85, lw=0, step="mid")
    axes.set_ylim(bottom=0)


def _plain(text: str) -> str:
    """Names of metrics come from the run: no control characters, and no dollar, which begins a formula."""
    return shorten(visible(text), MOST_LABEL).replace("$", r"\$")
