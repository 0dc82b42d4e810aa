"""The pictures of a calibration: P5 against position for each budget, and the chosen path with its cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sparrow.protocols import KVCache
from sparrow.recipes.calibrate_surface import Cell
from sparrow.tracking.picture import BLUE, GREY, ORANGE, RED
from sparrow.whole_files import write_whole


def draw_surface(file: Path, cells: Sequence[Cell], bin_width: int, tau: float, title: str) -> None:
    """A line and its interval for each budget, over the bins of cached length, and tau."""
    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    budgets = sorted({cell.budget for cell in cells})
    for order, budget in enumerate(budgets):
        shade = colormaps["viridis"](0.9 * order / max(1, len(budgets) - 1))
        row = [cell for cell in cells if cell.budget == budget and cell.tokens]
        at = [cell.bin_start + bin_width / 2 for cell in row]
        axes.plot(at, [cell.p5 for cell in row], color=shade, marker="o", ms=3, lw=1.6, label=f"{budget} pages")
        axes.fill_between(at, [cell.low for cell in row], [cell.high for cell in row], color=shade, alpha=0.15, lw=0)
    axes.axhline(tau, color=RED, ls="--", lw=1.2, label=f"tau = {tau:g}")
    _finish(axes, title, "acceptance rate, 5th percentile")
    axes.set_ylim(top=1.01)
    _save(figure, file)


def draw_path(file: Path, chosen: Sequence[Cell], cache: KVCache, bin_width: int, num_layers: int, title: str) -> None:
    """Budget over cached length, and below it the KV entries that a decoded token reads with it and without.

    Args:
        chosen: one cell for each measured bin, in order.
        cache: with the chosen schedule.
    """
    figure = Figure(figsize=(9, 7), dpi=120, layout="constrained")
    budget_axes, cost_axes = figure.subplots(2, 1, sharex=True)
    first, last = chosen[0].bin_start, chosen[-1].bin_start + bin_width
    length_L = torch.arange(max(first, 1), last)
    at, pages_L = length_L.numpy(), -(-length_L // cache.page_size)
    edges = [*(cell.bin_start for cell in chosen), last]
    budget_axes.stairs([cell.budget for cell in chosen], edges, color=BLUE, lw=2, label="schedule", baseline=None)
    budget_axes.plot(at, pages_L.numpy(), color=GREY, lw=1.2, ls="--", label="all pages (dense)")
    _finish(budget_axes, title, f"pages of {cache.page_size} tokens")
    read_L = cache.tokens_read(length_L, num_layers).double()
    dense_L = length_L.double() * num_layers
    share = float(read_L.sum() / dense_L.sum())
    cost_axes.plot(at, (read_L / num_layers).numpy(), color=ORANGE, lw=2, label="schedule, selection included")
    cost_axes.plot(at, (dense_L / num_layers).numpy(), color=GREY, lw=1.2, ls="--", label="dense")
    cost_title = f"KV read by a decoded token: {share:.0%} of dense over these lengths"
    _finish(cost_axes, cost_title, "KV entries, mean of layers")
    _save(figure, file)


def _finish(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("cached length (tokens)")
    axes.set_ylabel(label)
    axes.grid(color=GREY, alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))


def _save(figure: Figure, file: Path) -> None:
    FigureCanvasAgg(figure)
    write_whole(file, lambda part: figure.savefig(part, format="png"))
