"""P5 before and after a distillation, by budget and length: as a table, as files, as a picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sparrow.components.acceptance import TAIL, tail_quantile
from sparrow.recipes.calibrate_surface import GRID, Measured, bins_of, cells_of, inside, resampled_quantile
from sparrow.recipes.distill_config import DistillConfig
from sparrow.tracking.picture import GREY
from sparrow.whole_files import write_csv, write_text, write_whole

OWN_BUDGET = 0  # in the place of a number of pages: the schedule that was distilled under


@dataclass(frozen=True)
class Change:
    """One bin of cached length under one budget, or all bins together where `bin_start` is None.

    Attributes:
        before, after: P5; `_low` and `_high` are its interval.
        gain_low, gain_high: interval of the gain, sequences resampled in pairs; None where both sides are not of the
            same tokens, as in mode `generate`.
        p1_before, p1_after, mean_before, mean_after: of the same acceptance rates.
    """

    budget: int
    bin_start: int | None
    before: float
    before_low: float
    before_high: float
    after: float
    after_low: float
    after_high: float
    gain_low: float | None
    gain_high: float | None
    p1_before: float
    p1_after: float
    mean_before: float
    mean_after: float
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
            for start in parts:
                one, other = (inside(side[budget], start, parts.step) for side in (before, after))
                if len(one.alpha_N) and len(other.alpha_N):
                    rows.append(_change(one, other, budget, None if parts is whole else start, parts.step, cfg))
    return rows


def _change(
    before: Measured, after: Measured, budget: int, bin_start: int | None, width: int, cfg: DistillConfig
) -> Change:
    """Of the tokens of one bin."""
    start = bin_start or 0
    one, other = (
        cells_of(side, budget, range(start, start + width, width), cfg.confidence, cfg.resamples)[0]
        for side in (before, after)
    )
    gain_low, gain_high = _gain_interval(before, after, cfg)
    return Change(
        budget=budget,
        bin_start=bin_start,
        before=one.p5,
        before_low=one.low,
        before_high=one.high,
        after=other.p5,
        after_low=other.low,
        after_high=other.high,
        gain_low=gain_low,
        gain_high=gain_high,
        p1_before=tail_quantile(before.alpha_N, 0.01),
        p1_after=tail_quantile(after.alpha_N, 0.01),
        mean_before=float(before.alpha_N.double().mean()),
        mean_after=float(after.alpha_N.double().mean()),
        tokens=min(one.tokens, other.tokens),
    )


def _gain_interval(before: Measured, after: Measured, cfg: DistillConfig) -> tuple[float | None, float | None]:
    """Rounded outwards to the grid of the resamples."""
    if not torch.equal(before.sequence_N, after.sequence_N):
        return None, None
    gain_R = torch.zeros(())
    for side, sign in ((after, 1), (before, -1)):
        gain_R = gain_R + sign * resampled_quantile(side.alpha_N, side.sequence_N, TAIL, cfg.resamples, 0)
    outside = (1 - cfg.confidence) / 2
    return tail_quantile(gain_R, outside) - 1 / GRID, tail_quantile(gain_R, 1 - outside) + 1 / GRID


def table(rows: Sequence[Change]) -> list[str]:
    lines = ["budget  from    P5 before               P5 after                gain                     tokens"]
    for row in rows:
        before = f"{row.before:.3f} [{row.before_low:.3f}, {row.before_high:.3f}]"
        after = f"{row.after:.3f} [{row.after_low:.3f}, {row.after_high:.3f}]"
        paired = "" if row.gain_low is None else f" [{row.gain_low:+.3f}, {row.gain_high:+.3f}]"
        gain = f"{row.gain:+.3f}{paired}"
        lines.append(f"{_name(row.budget):<7} {_start(row):<7} {before:<23} {after:<23} {gain:<24} {row.tokens:,}")
    return lines


def _name(budget: int) -> str:
    return "own" if budget == OWN_BUDGET else str(budget)


def write_changes(folder: Path, rows: Sequence[Change], about: Mapping[str, Any]) -> None:
    """p5.csv and p5.json, which says as well what was run."""
    header = ("budget_pages", *(name for name in asdict(rows[0]) if name != "budget"))
    cells = [asdict(row) | {"bin_start": _start(row)} for row in rows]
    write_csv(folder / "p5.csv", header, [tuple(map(_cell, row.values())) for row in cells])
    text = json.dumps({**about, "rows": [asdict(row) | {"gain": row.gain} for row in rows]}, indent=1) + "\n"
    write_text(folder / "p5.json", text)


def _start(row: Change) -> object:
    return "all" if row.bin_start is None else row.bin_start


def _cell(value: object) -> object:
    return "" if value is None else f"{value:.5f}" if isinstance(value, float) else value


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
