"""P5 against budget for several calibrations, and the budget that each needs for the P5 of a reference.

python tools/plot_pareto.py --surface paper=outputs/pareto/Centroid_16/surface.csv \\
    --surface softmax=outputs/pareto/HeadSoftmax_16/surface.csv --png pareto.png --out pareto.json

A surface is the `surface.csv` of one sparrow_calibrate. For each bin and label: the smallest budget in tokens that
reaches tau; and for each P5 that the reference reaches with one of its budgets, the label's smallest budget for the
same, as a ratio to the reference's. Budgets are interpolated (in their logarithm, never beyond a label's grid); the
next budget of the label's grid stands beside them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter
from pareto import Curve, budget_for, choose_bins, curves, geometric_mean, ratios, read_labelled
from plot_rollout import COLOURS
from tool_results import exit_code

from sparrow.components.acceptance import DEFAULT_TAU
from sparrow.errors import UserError
from sparrow.whole_files import write_whole

TAU_COLOUR = "#c8402f"
LINE_STYLES = ("-", "--", ":")  # one for each round of the colours
PANELS_IN_A_ROW = 3
Curves = Mapping[str, Curve]  # by label
Row = dict[str, Any]


def compare(curves_by_label: Curves, reference: str, tau: float) -> dict[str, Row]:
    """By label, as written to the JSON file; null where a curve does not cover the P5 that is asked for."""
    rows: dict[str, Row] = {}
    for label, curve in curves_by_label.items():
        at_tau = budget_for(curve, tau)
        found = ratios(curve, curves_by_label[reference])
        rows[label] = {
            "at_tau": None if at_tau is None else asdict(at_tau),
            "at_equal_p5": [asdict(ratio) | {"ratio": ratio.ratio, "grid_ratio": ratio.grid_ratio} for ratio in found],
            "mean_ratio": geometric_mean([ratio.ratio for ratio in found]),
            "mean_grid_ratio": geometric_mean([ratio.grid_ratio for ratio in found]),
        }
    return rows


def table(start: int, rows: Mapping[str, Row], reference: str, tau: float) -> list[str]:
    """One bin on the console."""
    width = max(map(len, rows))
    lines = [f"from {start}: budgets in tokens, interpolated (next of the grid), over that of {reference}"]
    for label, row in rows.items():
        at_tau, pairs = row["at_tau"], row["at_equal_p5"]
        reaches = "not within its budgets" if at_tau is None else "{budget:.0f} ({grid_budget})".format(**at_tau)
        mean = "no P5 in common" if not pairs else f"{row['mean_ratio']:.3f} ({row['mean_grid_ratio']:.3f})"
        lines.append(f"  {label:{width}}  tau {tau:g}: {reaches:22}  at equal P5, mean of {len(pairs)}: {mean}")
        if label != reference:
            each = "P5 {p5:.3f}: {budget:.0f} ({grid_budget}) / {reference_budget} = {ratio:.3f} ({grid_ratio:.3f})"
            lines += [f"  {'':{width}}    {each.format(**pair)}" for pair in pairs]
    return lines


def draw(bins: Mapping[int, Curves], tau: float, png: Path) -> None:
    """A panel for each bin; the file is replaced at once when it is complete."""
    across = min(len(bins), PANELS_IN_A_ROW)
    down = -(-len(bins) // across)
    figure = Figure(figsize=(4.8 * across + 0.4, 3.8 * down), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(down, across, squeeze=False).flat
    for axes, (start, curves_by_label) in zip(panels, bins.items(), strict=False):
        _draw_panel(axes, f"cached tokens from {start}", curves_by_label, tau)
    for axes in list(figure.axes)[len(bins) :]:
        axes.set_axis_off()
    png.parent.mkdir(parents=True, exist_ok=True)
    write_whole(png, lambda part: figure.savefig(part, format="png"))


def _draw_panel(axes: Axes, title: str, curves_by_label: Curves, tau: float) -> None:
    for index, (label, curve) in enumerate(curves_by_label.items()):
        colour, style = COLOURS[index % len(COLOURS)], LINE_STYLES[index // len(COLOURS) % len(LINE_STYLES)]
        budgets, cells = zip(*curve, strict=True)
        axes.plot(budgets, [cell.p5 for cell in cells], f"o{style}", color=colour, label=label, markersize=3)
        low, high = [cell.p5_low for cell in cells], [cell.p5_high for cell in cells]
        axes.fill_between(budgets, low, high, color=colour, alpha=0.15, linewidth=0)
    axes.axhline(tau, color=TAU_COLOUR, linestyle="--", linewidth=1, label=f"tau = {tau:g}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:.0f}"))
    axes.set(title=title, xlabel="budget (tokens)", ylabel="acceptance rate, 5th percentile")
    axes.set_ylim(top=1.01)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)


def main(argv: Sequence[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--surface", action="append", required=True, metavar="LABEL=PATH")
    parser.add_argument("--reference", metavar="LABEL", help="the first one by default")
    parser.add_argument("--bins", type=int, nargs="+", metavar="START", help="the last one of all by default")
    parser.add_argument("--tau", type=float, default=DEFAULT_TAU["exact"])
    parser.add_argument("--min-tokens", type=int, default=1000, help="cells that rest on fewer are left out")
    parser.add_argument("--png", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="JSON")
    args = parser.parse_args(argv)
    return exit_code(lambda: _run(args))


def _run(args: argparse.Namespace) -> None:
    surfaces = read_labelled(args.surface)
    reference = args.reference or next(iter(surfaces))
    if reference not in surfaces:
        raise UserError(f"--reference {reference}: no such label; there are {', '.join(surfaces)}")
    by_label = {label: curves(surface, args.min_tokens) for label, surface in surfaces.items()}
    bins = {
        start: {label: found[start] for label, found in by_label.items()} for start in choose_bins(by_label, args.bins)
    }
    compared = {start: compare(found, reference, args.tau) for start, found in bins.items()}
    for start, rows in compared.items():
        print("\n".join(table(start, rows, reference, args.tau)))
    draw(bins, args.tau, args.png)
    content = {
        "reference": reference, "tau": args.tau, "min_tokens": args.min_tokens,
        "page_sizes": {label: surface.page_size for label, surface in surfaces.items()},
        "bins": [{"bin_start": start, "labels": rows} for start, rows in compared.items()],
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(args.out, lambda part: part.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8"))


if __name__ == "__main__":
    sys.exit(main())
