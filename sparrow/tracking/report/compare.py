"""Several runs side by side: their main curves in common charts, a table of their figures, the settings that differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from sparrow.tracking.report.chart import CYCLE, Chart, Line
from sparrow.tracking.report.health import ago, ends, last_step
from sparrow.tracking.report.metrics import Metrics, Series
from sparrow.tracking.report.panels import threshold
from sparrow.tracking.report.reduce import smoothed
from sparrow.tracking.report.run import Run
from sparrow.tracking.report.text import escaped, number
from sparrow.tracking.samples import shorten

# Metric, title, and the bounds of its axis. What a run adds to the rewards is told by smoothed curves.
CURVES: tuple[tuple[str, str, tuple[float | None, float | None]], ...] = (
    ("reward", "Reward", (None, None)),
    ("acceptance/p5", "Acceptance tail (P5 of alpha)", (None, None)),
    ("completions/mean_length", "Response length (tokens)", (0.0, None)),
    ("budget/kv_read_ratio", "KV read ratio", (0.0, 1.0)),
    ("tokens_per_second", "Rollout (tokens/s)", (0.0, None)),
    ("speedup/measured", "Speed-up over dense, measured", (None, None)),
    ("entropy", "Entropy (nats)", (None, None)),
    ("rollout_corr/k3_kl", "KL of rollout and dense policy (k3, nats)", (None, None)),
)
MOST_TEXT = 200


def charts(runs: Sequence[Run]) -> list[Chart]:
    """A chart for each main curve that one of the runs has, a line for each run."""
    drawn = [_chart(runs, name, title, bounds) for name, title, bounds in CURVES]
    validations = dict.fromkeys(name for run in runs for name in run.metrics.below("val/mean@"))
    for n in validations:
        lines = [Line(run.name, run.metrics.get(f"val/mean@{n}"), _color(i), "dots") for i, run in enumerate(runs)]
        drawn.insert(1, Chart("compare_validation", f"Validation, val/mean@{n}", lines, "Of the dense policy."))
    return [chart for chart in drawn if not chart.empty]


def _color(order: int) -> str:
    return CYCLE[order % len(CYCLE)]


def _chart(runs: Sequence[Run], name: str, title: str, bounds: tuple[float | None, float | None]) -> Chart:
    window = max(1, max(len(run.metrics.get(name)) for run in runs) // 20)
    lines = [Line(run.name, smoothed(run.metrics.get(name), window), _color(i)) for i, run in enumerate(runs)]
    marks = {threshold(run.metrics) for run in runs} if name == "acceptance/p5" else set()
    note = f"Mean of {window} steps." if window > 1 else ""
    key = f"compare_{name.replace('/', '_')}"
    return Chart(key, title, lines, note, bounds=bounds, mark=marks.pop() if len(marks) == 1 else None)


def table(runs: Sequence[Run]) -> str:
    """A column for each run, a row for each figure that one of them has."""
    rows = [(label, [figure(run) for run in runs]) for label, figure in _figures(runs)]
    return _table(runs, [(label, cells) for label, cells in rows if any(cells)])


def _figures(runs: Sequence[Run]) -> list[tuple[str, Callable[[Run], str]]]:
    validations = dict.fromkeys(name for run in runs for name in run.metrics.below("val/mean@"))
    return [
        ("steps", lambda run: f"{last_step(run.metrics)}{f' of {run.steps}' if run.steps else ''}"),
        ("reward, first → last", lambda run: _ends(run.metrics.get("reward"))),
        *((f"val/mean@{n}, first → last", _first_last(f"val/mean@{n}")) for n in validations),
        ("P5, last", lambda run: _last(run.metrics.get("acceptance/p5"))),
        ("steps with P5 below tau", lambda run: _share(run.metrics.get("acceptance/below_tau"))),
        ("KV read ratio, mean", lambda run: _mean(run.metrics.get("budget/kv_read_ratio"))),
        ("tokens/s, mean", lambda run: _mean(run.metrics.get("tokens_per_second"))),
        ("speed-up measured, mean", lambda run: _mean(run.metrics.get("speedup/measured"))),
        ("response length, last", lambda run: _last(run.metrics.get("completions/mean_length"))),
        ("time of a step, mean (s)", lambda run: _mean(run.metrics.get("time/step"))),
        ("time of all steps", lambda run: _total(run.metrics.get("time/step"))),
        ("alarms raised", lambda run: _alarms(run.metrics)),
    ]


def differing(runs: Sequence[Run]) -> str:
    """Settings that are not the same in all runs; nothing where a folder has none."""
    known = [run for run in runs if run.settings]
    if len(known) < 2:
        return '<p class="note">The folders hold no settings to compare (a save has them).</p>'
    keys = dict.fromkeys(key for run in known for key in run.settings)
    rows = [(key, [_setting(run, key) for run in runs]) for key in keys]
    differ = [(key, cells) for key, cells in rows if len(set(map(repr, cells))) > 1]
    return _table(runs, differ) if differ else '<p class="note">All settings are the same.</p>'


def _setting(run: Run, key: str) -> str:
    return shorten(str(run.settings[key]), MOST_TEXT) if key in run.settings else ""


def _table(runs: Sequence[Run], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    head = "".join(f'<th scope="col">{escaped(run.name)}</th>' for run in runs)
    body = "".join(
        f'<tr><th scope="row">{escaped(label)}</th>{"".join(f"<td>{escaped(cell)}</td>" for cell in cells)}</tr>'
        for label, cells in rows
    )
    return f'<div class="scroll"><table><tr><td></td>{head}</tr>{body}</table></div>'


def _ends(series: Series) -> str:
    found = ends(series)
    return f"{found[0]:.3f} → {found[1]:.3f}" if found else ""


def _first_last(name: str) -> Callable[[Run], str]:
    def figure(run: Run) -> str:
        series = run.metrics.get(name)
        return f"{series.values_N[0]:.3f} → {series.last:.3f}" if len(series) else ""

    return figure


def _last(series: Series) -> str:
    return number(series.last) if len(series) else ""


def _mean(series: Series) -> str:
    return number(float(series.finite_M.mean())) if len(series.finite_M) else ""


def _total(series: Series) -> str:
    return ago(float(series.finite_M.sum())) if len(series) else ""


def _share(series: Series) -> str:
    return f"{series.finite_M.mean():.0%}" if len(series.finite_M) else ""


def _alarms(metrics: Metrics) -> str:
    alarms = metrics.below("alarm/")
    raised = {name: int((series.finite_M > 0).sum()) for name, series in alarms.items()}
    words = [f"{name} ({count} {'step' if count == 1 else 'steps'})" for name, count in raised.items() if count]
    return ", ".join(words) or ("none" if alarms else "")
