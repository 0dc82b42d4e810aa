"""P5 before and after a distillation, by budget and length: as a table, as files, as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sparrow.recipes.calibrate_results import write_csv, write_whole
from sparrow.recipes.calibrate_surface import Cell, Measured, bins_of, cells_of
from sparrow.recipes.distill_config import DistillConfig
from sparrow.tracking.picture import GREY

OWN_BUDGET = 0  # in the place of a number of pages: the schedule that was distilled under


@dataclass(frozen=True)
class Change:
    """P5 and its interval of one bin of cached length under one budget, of all bins together where `bin_start` is None.

    In `teacher_forced` mode both are of the same tokens.
    """

    budget: int
    bin_start: int | None
    before: float
    before_low: float
    before_high: float
    after: float
    after_low: float
    after_high: float
    tokens: int

    @property
    def gain(self) -> float:
        return self.after - self.before


def changes(
    before: Mapping[int, Measured], after: Mapping[int, Measured], bin_width: int, cfg: DistillConfig
) -> list[Change]:
    """By budget the bins in order, those that have tokens on both sides, and all of them together at the end."""
    lengths = [tokens.cached_length_N for side in (before, after) for tokens in side.values()]
    bins = bins_of(lengths, bin_width, 0, None)
    whole = range(0, bins.stop, bins.stop)
    rows = []
    for budget in before:
        for parts in (bins, whole):
            pairs = zip(
                *(cells_of(side[budget], budget, parts, cfg.confidence, cfg.resamples) for side in (before, after)),
                strict=True,
            )
            rows += [_change(one, other, parts is whole) for one, other in pairs if one.tokens and other.tokens]
    return rows


def _change(before: Cell, after: Cell, whole: bool) -> Change:
    values = (before.p5, before.low, before.high, after.p5, after.low, after.high)
    return Change(before.budget, None if whole else before.bin_start, *values, min(before.tokens, after.tokens))


def table(rows: Sequence[Change]) -> list[str]:
    lines = ["budget  from    P5 before               P5 after                gain     tokens"]
    for row in rows:
        start = "all" if row.bin_start is None else str(row.bin_start)
        before = f"{row.before:.3f} [{row.before_low:.3f}, {row.before_high:.3f}]"
        after = f"{row.after:.3f} [{row.after_low:.3f}, {row.after_high:.3f}]"
        lines.append(f"{_name(row.budget):<7} {start:<7} {before:<23} {after:<23} {row.gain:<+8.3f} {row.tokens:,}")
    return lines


def _name(budget: int) -> str:
    return "own" if budget == OWN_BUDGET else str(budget)


def write_changes(folder: Path, rows: Sequence[Change], about: Mapping[str, Any]) -> None:
    """p5.csv and p5.json, which says as well what was run."""
    header = ("budget_pages", *(name for name in asdict(rows[0]) if name != "budget"))
    write_csv(folder / "p5.csv", header, [tuple(_cell(value) for value in asdict(row).values()) for row in rows])
    text = json.dumps({**about, "rows": [asdict(row) | {"gain": row.gain} for row in rows]}, indent=1) + "\n"
    write_whole(folder / "p5.json", lambda part: part.write_text(text, encoding="utf-8"))


def _cell(value: float | None) -> object:
    return "all" if value is None else f"{value:.5f}" if isinstance(value, float) else value


def draw_changes(file: Path, rows: Sequence[Change], bin_width: int, title: str) -> None:
    """A dashed line before and a full one after for each budget, over the bins of cached length."""
    figure = Figure(figsize=(9, 5.5), dpi=120, layout="constrained")
    axes = figure.subplots()
    budgets = sorted({row.budget for row in rows})
    for order, budget in enumerate(budgets):
        shade = colormaps["viridis"](0.9 * order / max(1, len(budgets) - 1))
        row = [row for row in rows if row.budget == budget and row.bin_start is not None]
        at = [change.bin_start + bin_width / 2 for change in row if change.bin_start is not None]
        axes.plot(at, [change.before for change in row], color=shade, ls="--", lw=1.2)
        axes.plot(
            at, [change.after for change in row], color=shade, marker="o", ms=3, lw=1.8, label=f"{_name(budget)} pages"
        )
        low, high = [change.after_low for change in row], [change.after_high for change in row]
        axes.fill_between(at, low, high, color=shade, alpha=0.15, lw=0)
    axes.set_title(f"{title}; dashed: before", loc="left", fontsize=11)
    axes.set_xlabel("cached length (tokens)")
    axes.set_ylabel("acceptance rate, 5th percentile")
    axes.set_ylim(top=1.01)
    axes.grid(color=GREY, alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.01, 0.5))
    FigureCanvasAgg(figure)
    write_whole(file, lambda part: figure.savefig(part, format="png"))
