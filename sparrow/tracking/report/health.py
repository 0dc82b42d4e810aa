"""How a run is, in a few words: what its owner looks for first."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import numpy as np

from sparrow.tracking.report.metrics import Metrics, Series
from sparrow.tracking.report.run import Run
from sparrow.tracking.report.text import number

State = Literal["good", "warn", "bad", ""]
# Of a run that has steps to go: it is called silent after so many of its own steps, and not before ten minutes.
SILENT_STEPS, SILENT_SECONDS = 5, 600


@dataclass(frozen=True)
class Fact:
    """`detail` is one short sentence; `state` colours the fact, and its words say the same."""

    label: str
    value: str
    detail: str = ""
    state: State = ""


def facts(run: Run, now: float) -> list[Fact]:
    """The health line; what the run does not log is left out."""
    found = [_progress(run), _reward(run.metrics), _validation(run.metrics), _tail(run.metrics), _alarms(run.metrics)]
    return [fact for fact in [*found, _saved(run.metrics), _age(run, now)] if fact is not None]


def verdict(found: list[Fact]) -> Fact:
    """One word for the whole, that of the worst fact."""
    bad = [fact for fact in found if fact.state == "bad"]
    warned = [fact for fact in found if fact.state == "warn"]
    if bad or warned:
        names = ", ".join(fact.label.lower() for fact in (bad or warned))
        return Fact("Health", "look at this" if bad else "watch", names, "bad" if bad else "warn")
    judged = [fact.label.lower() for fact in found if fact.state == "good"]
    if not judged:
        return Fact("Health", "unknown", "the run logs neither alarms nor the tail")
    return Fact("Health", "no complaint", f"judged by: {', '.join(judged)}", "good")


def last_step(metrics: Metrics) -> int:
    """0 before the first line."""
    return int(metrics.steps_N[-1]) if len(metrics.steps_N) else 0


def ends(series: Series) -> tuple[float, float, int] | None:
    """Mean of the first and of the last values, a tenth of them but at most 20, and how many these are."""
    finite_M = series.finite_M
    if not len(finite_M):
        return None
    count = min(max(len(finite_M) // 10, 1), 20)
    return float(finite_M[:count].mean()), float(finite_M[-count:].mean()), count


def _progress(run: Run) -> Fact:
    step = last_step(run.metrics)
    if run.steps is None:
        return Fact("Step", str(step), "the folder does not say of how many")
    done = f"{step / max(run.steps, 1):.0%} done"
    return Fact("Step", f"{step} of {run.steps}", done if step < run.steps else "finished")


def _reward(metrics: Metrics) -> Fact | None:
    found = ends(metrics.get("reward"))
    if found is None:
        return None
    first, last, count = found
    of = f"means of the first and last {count} steps" if count > 1 else "first and last step"
    return Fact("Reward", f"{first:.3f} → {last:.3f}", of)


def _validation(metrics: Metrics) -> Fact | None:
    for n, series in metrics.below("val/mean@").items():
        if len(series):
            at = f"step {series.steps_N[0]} → step {series.steps_N[-1]}"
            return Fact(f"Validation, mean@{n}", f"{series.values_N[0]:.3f} → {series.last:.3f}", at)
    return None


def _tail(metrics: Metrics) -> Fact | None:
    p5, tau = metrics.get("acceptance/p5"), metrics.get("acceptance/tau").last
    if not len(p5):
        return None
    bins = [(found.last, start) for start, found in metrics.bins("acceptance/p5_bin/").items()
            if found.steps_N[-1] == p5.steps_N[-1] and np.isfinite(found.last)]  # fmt: skip
    worst = "lowest bin {:.4g}, from {} cached tokens".format(*min(bins)) if bins else ""
    if not np.isfinite(p5.last):
        return Fact("P5 of acceptance", number(p5.last), "not a number at the last step", "bad")
    if not np.isfinite(tau):
        return Fact("P5 of acceptance", f"{p5.last:.4g}", worst)
    side = "above" if p5.last >= tau else "below"
    low = any(value < tau for value, _ in bins)
    state: State = "bad" if p5.last < tau else "warn" if low else "good"
    return Fact("P5 of acceptance", f"{p5.last:.4g}, {side} tau {tau:g}", worst, state)


def _alarms(metrics: Metrics) -> Fact | None:
    alarms = metrics.below("alarm/")
    if not alarms:
        return None
    newest = max(series.steps_N[-1] for series in alarms.values())
    now = [name for name, series in alarms.items() if series.steps_N[-1] == newest and series.last > 0]
    ever = sum(bool((series.finite_M > 0).any()) for name, series in alarms.items() if name != "fallback")
    past = f"{ever} of {len(alarms) - ('fallback' in alarms)} were raised at some step" if ever else "never any"
    return Fact("Alarms now", ", ".join(now) or "none", past, "bad" if now else "good")


def _saved(metrics: Metrics) -> Fact | None:
    ratio = metrics.get("budget/kv_read_ratio").finite_M
    if not len(ratio):
        return None
    speedup = metrics.get("speedup/measured")
    detail = f"speed-up {speedup.last:.2f} as measured" if len(speedup) else "of those cached, mean of all steps"
    return Fact("KV entries read", f"{ratio.mean():.0%}", detail)


def _age(run: Run, now: float) -> Fact:
    age, at = max(now - run.written, 0.0), datetime.fromtimestamp(run.written, UTC)
    seconds = run.metrics.get("time/step").finite_M
    usual = float(np.median(seconds[-50:])) if len(seconds) else 0.0
    open_end = run.steps is not None and last_step(run.metrics) < run.steps
    silent = open_end and age > max(SILENT_SECONDS, SILENT_STEPS * usual)
    detail = f"{at:%Y-%m-%d %H:%M} UTC" + (f"; a step takes {ago(usual)}" if usual else "")
    if silent:
        detail += "; stopped, or stuck?"
    return Fact("Age of the data", ago(age), f"when this page was made; last line {detail}", "warn" if silent else "")


def ago(seconds: float) -> str:
    """45 s, 12 min, 3 h 20 min, 4 days."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 100:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60} min" if minutes < 48 * 60 else f"{minutes // 1440} days"
