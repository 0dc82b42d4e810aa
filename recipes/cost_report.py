"""Tables and picture of sparrow_cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sparrow.cost import Cost
from sparrow.cost_search import Choice
from sparrow.rates import Rates
from sparrow.recipes.cost_measured import Comparison
from sparrow.whole_files import write_whole

COLOURS = ("#2f6db3", "#e08a1e", "#3a9a5b", "#8a5bb3", "#2a9d9d", "#8a8f98")
DENSE_COLOUR = "#c8402f"
Costs = Mapping[str, Cost]  # by cache


def step_table(by_context: Mapping[int, Costs], rows: int, rates: Rates) -> list[str]:
    """A line for each context: milliseconds of each cache, the dense one's over it, and what selection reads."""
    names = list(next(iter(by_context.values())))
    width = max(20, *map(len, names))
    heading = f"a decode step of {rows} rows, ms (dense over it), selection's share of the bytes"
    lines = [heading, _row("context", names, width)]
    for context, costs in by_context.items():
        dense = costs["dense"].seconds(rates)
        cells = [
            f"{cost.seconds(rates) * 1e3:.2f} ({dense / cost.seconds(rates):.2f}) {cost.selection_share:6.1%}"
            for cost in costs.values()
        ]
        lines.append(_row(str(context), cells, width))
    return lines


def rollout_table(costs: Costs, rates: Rates) -> list[str]:
    """A line for each cache: what a whole batch of rollouts costs."""
    width = max(map(len, costs))
    lines = [
        f"all rollouts; eFLOPs with I = {rates.intensity:.0f} FLOPs per element; marks: what selection reads",
        f"{'':{width}}  {'PFLOP':>8} {'weights TB':>10} {'KV TB':>8} {'marks TB':>8} {'marks':>6} "
        f"{'s':>8} {'x time':>7} {'x eFLOP':>7}",
    ]
    for name, cost in costs.items():
        terabytes = [
            elements * rates.element_bytes / 1e12
            for elements in (cost.weight_elements, cost.kv_elements, cost.landmark_elements)
        ]
        speedup = costs["dense"].seconds(rates) / cost.seconds(rates)
        eflop = costs["dense"].eflop(rates.intensity) / cost.eflop(rates.intensity)
        lines.append(
            f"{name:{width}}  {cost.flop / 1e15:8.3g} {terabytes[0]:10.4g} {terabytes[1]:8.4g} {terabytes[2]:8.3g} "
            f"{cost.selection_share:6.1%} {cost.seconds(rates):8.4g} {speedup:7.2f} {eflop:7.2f}"
        )
    return lines


def comparison_table(comparisons: Sequence[Comparison], latencies: tuple[float, float] | None) -> list[str]:
    """A line for each measured case, and what the steps take above the prediction."""
    case_width, width = (max(len(getattr(c, key)) for c in comparisons) for key in ("case", "cache"))
    lines = ["predicted against measured: seconds, the one over the other, and speed-up over dense"]
    for c in comparisons:
        line = f"{c.case:{case_width}}  {c.cache:{width}}  {c.predicted_s:10.5f} {c.measured_s:10.5f}"
        line += f" {c.predicted_s / c.measured_s:5.2f}"
        if c.predicted_speedup is not None and c.measured_speedup is not None:
            line += f"  {c.predicted_speedup:5.2f} x predicted, {c.measured_speedup:5.2f} x measured"
        lines.append(line)
    if latencies is not None:
        lines.append(
            "above the prediction: {:.1f} us a layer (rates.layer_us), {:.1f} us more a sparse one "
            "(rates.selection_us)".format(*latencies)
        )
    return lines


def search_table(choices: Sequence[Choice], failures: Sequence[str], dense_s: float, longest: int) -> list[str]:
    """Page sizes, cheapest first, with their schedules, then those that have none.

    Args:
        dense_s: seconds that a dense cache takes for the same tokens; weights and prefill are in neither.
        longest: cached length that the workload reaches.
    """
    lines = ["cheapest schedules on the surface: seconds of attention and scoring (dense over it)"]
    for choice in sorted(choices, key=lambda choice: choice.cost):
        ratio = dense_s / choice.cost if choice.cost else 1.0
        lines.append(f"page {choice.page_size:4d}  {choice.cost:9.4g} ({ratio:.2f})  pages: {choice.pages}")
        if choice.end <= longest:
            lines.append(f"           from {choice.end} to {longest} nothing was measured: the last entry holds on")
    return [*lines, *(f"none: {failure}" for failure in failures)]


def draw_costs(
    by_context: Mapping[int, Costs], rates: Rates, rows: int, comparisons: Sequence[Comparison], png: Path
) -> None:
    """Milliseconds of a step and the speed-up over dense, both against the context; and measured steps as points."""
    figure = Figure(figsize=(10, 4), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    time, speedup = figure.subplots(1, 2)
    contexts, colours = [context / 1024 for context in by_context], iter(COLOURS * 9)
    for name in next(iter(by_context.values())):
        colour = DENSE_COLOUR if name == "dense" else next(colours)
        seconds = [costs[name].seconds(rates) for costs in by_context.values()]
        dense = [costs["dense"].seconds(rates) for costs in by_context.values()]
        time.plot(contexts, [s * 1e3 for s in seconds], "-", color=colour, label=name)
        speedup.plot(contexts, [d / s for d, s in zip(dense, seconds, strict=True)], "-", color=colour, label=name)
        points = [c for c in comparisons if c.cache == name and c.context and c.rows == rows]
        time.plot([c.context / 1024 for c in points], [c.measured_s * 1e3 for c in points], "o", color=colour)
        fast = [c for c in points if c.measured_speedup is not None]
        speedup.plot([c.context / 1024 for c in fast], [c.measured_speedup for c in fast], "o", color=colour)
    _finish(time, f"A decode step of {rows} rows, predicted (points: measured)", "ms")
    _finish(speedup, "Speed-up over dense", "dense / sparse")
    write_whole(png, lambda part: figure.savefig(part, format="png"))


def _finish(axes: Axes, title: str, label: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set(xlabel="cached tokens of each row (1,024)", ylabel=label)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, frameon=False)


def _row(head: str, cells: Sequence[str], width: int) -> str:
    return f"{head:>8} " + " ".join(f"{cell:>{width}}" for cell in cells)
