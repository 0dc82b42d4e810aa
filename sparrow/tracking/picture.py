"""A picture of a run, drawn from its metrics.jsonl: reward, acceptance tail, KV budget, response length."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from sparrow.tracking.jsonl import read_jsonl

Steps = dict[int, dict[str, Any]]

BLUE, ORANGE, GREEN, RED, GREY = "#2f6db3", "#e08a1e", "#3a9a5b", "#c8402f", "#8a8f98"
BIN_PREFIX = "acceptance/p5_bin/"


def draw_run(metrics_jsonl: Path, png: Path, tau: float | None = None) -> None:
    """Draws four panels over the steps so far; a run of no steps gives empty panels.

    Args:
        metrics_jsonl: as `JsonlTracker` writes it; may still be growing.
        png: replaced at once when the new picture is complete.
        tau: P5 threshold to draw; None takes the last `acceptance/tau` of the run, if it has one.
    """
    steps: Steps = {}
    for row in read_jsonl(metrics_jsonl):
        steps.setdefault(int(row["step"]), {}).update(row)
    steps = dict(sorted(steps.items()))
    figure = Figure(figsize=(11, 7), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    (reward, acceptance), (budget, length) = figure.subplots(2, 2)
    _draw_reward(reward, steps)
    _draw_acceptance(acceptance, steps, tau)
    _draw_budget(budget, steps)
    _draw_length(length, steps)
    for axes in (reward, acceptance, budget, length):
        _finish(axes, steps)
    part = png.with_name(png.name + ".part")
    figure.savefig(part, format="png")
    os.replace(part, png)


def series(steps: Steps, name: str) -> tuple[list[int], list[float]]:
    """The steps that have this metric, and its values there."""
    found = [(step, float(row[name])) for step, row in steps.items() if name in row]
    return [step for step, _ in found], [value for _, value in found]


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Mean over the last `window` values up to each one, without those that are not finite."""
    result = []
    for end in range(1, len(values) + 1):
        recent = np.asarray(values[max(0, end - window) : end])
        finite = recent[np.isfinite(recent)]
        result.append(float(finite.mean()) if finite.size else float("nan"))
    return result


def _window(steps: Steps) -> int:
    """Steps to smooth over: a twentieth of the run."""
    return max(1, len(steps) // 20)


def _names(steps: Steps, prefix: str) -> list[str]:
    return list(dict.fromkeys(name for row in steps.values() for name in row if name.startswith(prefix)))


def _draw_reward(axes: Axes, steps: Steps) -> None:
    _title(axes, "Reward")
    at, values = series(steps, "reward")
    window = _window(steps)
    axes.plot(at, values, color=BLUE, alpha=0.3, lw=1)
    axes.plot(at, smoothed(values, window), color=BLUE, lw=2, label=f"train, mean of {window} steps")
    for name, color in zip(_names(steps, "val/mean@"), (ORANGE, GREEN, RED), strict=False):
        axes.plot(*series(steps, name), color=color, marker="o", ms=4, lw=1.5, label=name)


def _draw_acceptance(axes: Axes, steps: Steps, tau: float | None) -> None:
    _title(axes, "Acceptance rate, 5th percentile, by cached length")
    starts = sorted(int(name.removeprefix(BIN_PREFIX)) for name in _names(steps, BIN_PREFIX))
    for order, start in enumerate(starts):
        shade = colormaps["viridis"](0.15 + 0.75 * order / max(1, len(starts) - 1))
        # The first, the middle and the last bin are enough for a legend.
        named = order in (0, len(starts) // 2, len(starts) - 1)
        label = f"from {start}" if named else ""
        at, values = series(steps, f"{BIN_PREFIX}{start}")
        axes.plot(at, smoothed(values, _window(steps)), color=shade, lw=1, alpha=0.8, label=label)
    at, values = series(steps, "acceptance/p5")
    axes.plot(at, values, color="black", alpha=0.3, lw=1)
    axes.plot(at, smoothed(values, _window(steps)), color="black", lw=2, label="all tokens")
    logged = series(steps, "acceptance/tau")[1]
    threshold = tau if tau is not None else (logged[-1] if logged else None)
    if threshold is not None:
        axes.axhline(threshold, color=RED, ls="--", lw=1.2, label=f"tau = {threshold:g}")


def _draw_budget(axes: Axes, steps: Steps) -> None:
    _title(axes, "KV read per decoded token")
    axes.plot(*series(steps, "budget/kv_read_ratio"), color=BLUE, lw=2, label="share of the cache")
    axes.set_ylim(0, 1.05)
    at, pages = series(steps, "budget/mean_pages")
    if at:
        _second_axis(axes, at, pages, "mean pages", ORANGE).set_ylim(bottom=0)


def _draw_length(axes: Axes, steps: Steps) -> None:
    _title(axes, "Response length (tokens)")
    axes.plot(*series(steps, "completions/mean_length"), color=BLUE, lw=2, label="all")
    axes.plot(*series(steps, "completions/mean_terminated_length"), color=GREEN, lw=1.2, label="terminated")
    axes.set_ylim(bottom=0)
    at, clipped = series(steps, "completions/clipped_ratio")
    if at:
        _second_axis(axes, at, clipped, "cut at the limit (share)", RED).set_ylim(0, 1.05)


def _title(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=11, pad=20)


def _second_axis(axes: Axes, at: list[int], values: list[float], label: str, color: str) -> Axes:
    twin = axes.twinx()
    twin.plot(at, values, color=color, lw=1.2, ls=":")
    twin.set_ylabel(label, color=color)
    twin.tick_params(axis="y", colors=color)
    twin.spines["top"].set_visible(False)
    # Labelled on the first axis, so that one legend has both.
    axes.plot([], [], color=color, lw=1.2, ls=":", label=label)
    return twin


def _finish(axes: Axes, steps: Steps) -> None:
    axes.set_xlabel("step")
    axes.grid(color=GREY, alpha=0.2)
    axes.spines["top"].set_visible(False)
    if not steps:
        axes.text(0.5, 0.5, "no steps yet", ha="center", va="center", transform=axes.transAxes, color=GREY)
        return
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    # Above the panel, where it hides no line.
    style: dict[str, Any] = {"frameon": False, "fontsize": 8, "handlelength": 1.5, "columnspacing": 1.2}
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, ncols=5, **style)
