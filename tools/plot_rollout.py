"""Draws ms per decode step against context, measured and roof, from the JSON files of `bench_rollout.py step --out`.

python tools/plot_rollout.py step_4b.json step_8b.json --png docs/img/step_ms.png
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from tool_results import exit_code

from sparrow.errors import UserError

MARKERS = ("o", "s", "^")
COLOURS = ("#2f6db3", "#e08a1e", "#3a9a5b", "#8a5bb3", "#2a9d9d", "#8a8f98")
DENSE_COLOUR = "#c8402f"
Row = dict[str, Any]


def read_steps(paths: Sequence[Path]) -> list[Row]:
    """The rows of all files; UserError where one is not to be read, or of another mode."""
    rows: list[Row] = []
    for path in paths:
        try:
            found = json.loads(path.read_text(encoding="utf-8"))["results"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not a JSON file of bench_rollout.py --out: {error!r}") from None
        if not found or any(key not in row for row in found for key in ("context", "ms", "roof_ms")):
            raise UserError(f"{path}: no result of mode `step`")
        rows += found
    return rows


def draw_steps(rows: Sequence[Row], png: Path) -> None:
    """A panel for each model and batch; the file is replaced at once when it is complete."""
    panels = defaultdict(list)
    for row in rows:
        panels[f"{row['model']}, batch {row['batch']}"].append(row)
    for title, panel in panels.items():
        _check_lines(title, panel)
    figure = Figure(figsize=(4.6 * len(panels) + 0.4, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (title, panel) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True):
        _draw_panel(axes, title, panel)
    png.parent.mkdir(parents=True, exist_ok=True)
    part = png.with_name(png.name + ".part")
    figure.savefig(part, format="png")
    part.replace(png)


def _check_lines(title: str, rows: Sequence[Row]) -> None:
    labels, styles = {_label(row, rows) for row in rows} - {"dense"}, len(MARKERS) * len(COLOURS)
    if len(labels) > styles:
        raise UserError(f"{title}: {len(labels)} caches are more than the {styles} lines of a panel; give fewer files")


def _draw_panel(axes: Axes, title: str, rows: Sequence[Row]) -> None:
    lines = defaultdict(list)
    for row in sorted(rows, key=lambda row: row["context"]):
        lines[_label(row, rows)].append(row)
    styles = itertools.product(MARKERS, COLOURS)
    for label, points in lines.items():
        marker, colour = ("o", DENSE_COLOUR) if label == "dense" else next(styles)
        context = [point["context"] / 1024 for point in points]
        ms = [point["ms"] for point in points]
        axes.plot(context, ms, marker=marker, color=colour, label=label, markersize=4)
        axes.plot(context, [point["roof_ms"] for point in points], ":", color=colour, linewidth=1)
    axes.plot([], [], ":", color="black", linewidth=1, label="roof: bytes at the measured bandwidth")
    axes.set(title=title, xlabel="cached tokens of each row (1,024)", ylabel="ms per step")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)


def _label(row: Row, rows: Sequence[Row]) -> str:
    """The cache; with its backend where the panel has several."""
    several = len({other["backend"] for other in rows}) > 1
    return f"{row['cache']}, {row['backend']}" if several else str(row["cache"])


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", nargs="+", type=Path)
    parser.add_argument("--png", type=Path, required=True)
    args = parser.parse_args(argv)
    return exit_code(lambda: draw_steps(read_steps(args.json), args.png))


if __name__ == "__main__":
    sys.exit(main())
