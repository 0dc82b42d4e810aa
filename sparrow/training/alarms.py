"""Alarms on the metrics of a step: warn, go on with dense rollouts, or stop, before the reward falls.

An alarm is raised after `patience` bad steps in a row and cleared after as many good ones. A step that lacks its
metrics (a no-op has no gradient) counts as neither; a metric that is NaN is bad.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from sparrow.errors import UserError

Metrics = Mapping[str, float]
Action = Literal["warn", "dense", "stop"]
# Each is logged where it stands and counts there; an alarm on any of them is the same alarm.
NONFINITE = ("acceptance/nonfinite", "rollout_corr/nonfinite", "loss/nonfinite", "update/skipped", "distill/skipped")
# What a limit lies between: the end at which the alarm could never be raised is left out, null turns it off.
BOUNDS_BELOW = {"p5": (0.0, 1.0), "entropy": (0.0, 1.0)}
BOUNDS_ABOVE = {
    "clipped_ratio": (0.0, 1.0),
    "grad_norm": (1.0, math.inf),
    "logprob_diff": (0.0, math.inf),
    "nonfinite": (0.0, math.inf),
}
HISTORY = 50  # steps that a running mean or median goes over
FIRST_JUDGED = 5  # values that it takes before one is held against it


@dataclass(kw_only=True)
class AlarmRule:
    """When an alarm is raised, and what follows.

    Attributes:
        limit: its meaning and default are the alarm's, see `Alarms`.
        patience: bad steps in a row that raise it, and good ones that clear it; the default is the alarm's.
        action: `warn` says so; `dense` also makes the rollouts with a dense cache until it clears; `stop` saves and
            ends the run.
    """

    limit: float | None = None
    patience: int | None = None
    action: Action = "warn"

    def __post_init__(self) -> None:
        if self.patience is not None and self.patience < 1:
            raise UserError(f"patience: {self.patience} must be at least 1")


@dataclass(kw_only=True)
class Alarms:
    """The rules by name; null turns an alarm off. Defaults of limit and patience in brackets.

    Attributes:
        p5: `acceptance/p5` below the limit [`acceptance/tau`; 3].
        entropy: `entropy` below this share of its running mean [.3; 3].
        clipped_ratio: `completions/clipped_ratio` above the limit [.5; 3].
        grad_norm: `grad_norm` above so many times its running median [10; 1].
        logprob_diff: `engine/logprob_diff_mean` above the limit in nats [.5; 3].
        nonfinite: what was not finite, in `NONFINITE`, above the limit in sum [0; 1].
    """

    p5: AlarmRule | None = field(default_factory=AlarmRule)
    entropy: AlarmRule | None = field(default_factory=AlarmRule)
    clipped_ratio: AlarmRule | None = field(default_factory=AlarmRule)
    grad_norm: AlarmRule | None = field(default_factory=AlarmRule)
    logprob_diff: AlarmRule | None = field(default_factory=AlarmRule)
    nonfinite: AlarmRule | None = field(default_factory=AlarmRule)

    def __post_init__(self) -> None:
        for name, rule in self.rules().items():
            if rule.limit is not None:
                _check_limit(name, rule.limit)

    def rules(self) -> dict[str, AlarmRule]:
        """Those that are on."""
        rules = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: rule for name, rule in rules.items() if rule is not None}


@dataclass(frozen=True)
class Reading:
    """What an alarm saw in one step."""

    value: float
    bad: bool
    limit: float


class Threshold:
    """A metric, or the sum of several, against a bound; the bound is the limit, or else a metric of the same step."""

    def __init__(self, metrics: tuple[str, ...], limit: float | str, below: bool) -> None:
        self.metrics, self.limit, self.below = metrics, limit, below

    def read(self, metrics: Metrics) -> Reading | None:
        values = [metrics[name] for name in self.metrics if name in metrics]
        limit = metrics.get(self.limit) if isinstance(self.limit, str) else self.limit
        if not values or limit is None:
            return None
        value = sum(values)
        return Reading(value, not (value >= limit if self.below else value <= limit), limit)

    def state_dict(self) -> list[float]:
        return []

    def load_state_dict(self, state: list[float]) -> None:
        """It remembers nothing."""


class Running:
    """A metric against its own past: below a share of the mean, or above a multiple of the median, of steps before.

    The mean leaves bad steps out, or a collapse would soon be the measure of itself. The median takes them: a spike
    does not move it, and what lasts is no spike.
    """

    def __init__(self, metric: str, factor: float, below: bool) -> None:
        self.metric, self.factor, self.below = metric, factor, below
        self.past: deque[float] = deque(maxlen=HISTORY)

    def read(self, metrics: Metrics) -> Reading | None:
        if self.metric not in metrics:
            return None
        value = metrics[self.metric]
        limit = self._limit()
        kept = value >= limit if self.below else value <= limit
        bad = not (math.isfinite(value) and kept)
        if math.isfinite(value) and not (bad and self.below):
            self.past.append(value)
        return Reading(value, bad, limit)

    def _limit(self) -> float:
        if len(self.past) < FIRST_JUDGED:
            return -math.inf if self.below else math.inf
        return self.factor * (statistics.fmean(self.past) if self.below else statistics.median(self.past))

    def state_dict(self) -> list[float]:
        return list(self.past)

    def load_state_dict(self, state: list[float]) -> None:
        self.past = deque(state, maxlen=HISTORY)


@dataclass
class Watch:
    """One alarm: how it reads a step, what follows, and where it stands."""

    probe: Threshold | Running
    patience: int
    action: Action
    raised: bool = False
    in_a_row: int = 0  # steps that speak against where it stands

    def step(self, metrics: Metrics) -> Reading | None:
        """The reading where the alarm changed by it, else None."""
        reading = self.probe.read(metrics)
        if reading is None:
            return None
        self.in_a_row = self.in_a_row + 1 if reading.bad != self.raised else 0
        if self.in_a_row < self.patience:
            return None
        self.raised, self.in_a_row = reading.bad, 0
        return reading


class AlarmMonitor:
    """All alarms of a run.

    Args:
        alarms: the rules of the config; None where all are off.

    Attributes:
        stopped_by: names of raised alarms whose action is `stop`.
        fallback: whether the next rollouts are to be dense.
    """

    def __init__(self, alarms: Alarms | None) -> None:
        rules = {} if alarms is None else alarms.rules()
        self.watches = {name: _watch(name, rule) for name, rule in rules.items()}

    @property
    def stopped_by(self) -> list[str]:
        return [name for name, watch in self.watches.items() if watch.raised and watch.action == "stop"]

    @property
    def fallback(self) -> bool:
        return any(watch.raised and watch.action == "dense" for watch in self.watches.values())

    def step(self, metrics: Metrics) -> tuple[dict[str, float], list[str]]:
        """Metrics `alarm/<name>`, 0 or 1, and `alarm/fallback`; and a line for each alarm that changed."""
        lines = []
        for name, watch in self.watches.items():
            if (reading := watch.step(metrics)) is not None:
                lines.append(_line(name, watch, reading))
        found = {f"alarm/{name}": float(watch.raised) for name, watch in self.watches.items()}
        return found | {"alarm/fallback": float(self.fallback)}, lines

    def state_dict(self) -> dict[str, Any]:
        return {
            name: {"raised": watch.raised, "in_a_row": watch.in_a_row, "past": watch.probe.state_dict()}
            for name, watch in self.watches.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """An alarm that the saved run did not have starts afresh; so does one that stops, or no step would follow."""
        for name, watch in self.watches.items():
            if name not in state:
                continue
            watch.probe.load_state_dict(state[name]["past"])
            if not (state[name]["raised"] and watch.action == "stop"):
                watch.raised, watch.in_a_row = state[name]["raised"], state[name]["in_a_row"]


def _check_limit(name: str, limit: float) -> None:
    if name in BOUNDS_BELOW:
        low, high = BOUNDS_BELOW[name]
        fits, words = low < limit <= high, f"above {low:g} and at most {high:g}"
    else:
        low, high = BOUNDS_ABOVE[name]
        fits, words = low <= limit < high, f"at least {low:g} and " + (f"below {high:g}" if high == 1 else "finite")
    if not fits:
        raise UserError(f"{name}.limit {limit} must be {words}; {name}: null turns the alarm off")


def _watch(name: str, rule: AlarmRule) -> Watch:
    def limit(default: float) -> float:
        return default if rule.limit is None else rule.limit

    probe: Threshold | Running
    patience = 3
    match name:
        case "p5":
            probe = Threshold(("acceptance/p5",), "acceptance/tau" if rule.limit is None else rule.limit, below=True)
        case "entropy":
            probe = Running("entropy", limit(0.3), below=True)
        case "clipped_ratio":
            probe = Threshold(("completions/clipped_ratio",), limit(0.5), below=False)
        case "grad_norm":
            probe, patience = Running("grad_norm", limit(10.0), below=False), 1
        case "logprob_diff":
            probe = Threshold(("engine/logprob_diff_mean",), limit(0.5), below=False)
        case _:
            assert name == "nonfinite"
            probe, patience = Threshold(NONFINITE, limit(0.0), below=False), 1
    return Watch(probe, patience if rule.patience is None else rule.patience, rule.action)


def _line(name: str, watch: Watch, reading: Reading) -> str:
    side = "below" if watch.probe.below else "above"
    if not watch.raised:
        return f"alarm {name} cleared: {reading.value:.4g} (limit {reading.limit:.4g})"
    then = {"warn": "", "dense": "; the next rollouts are dense", "stop": "; the run stops"}[watch.action]
    steps = f", {watch.patience} steps in a row" if watch.patience > 1 else ""
    return f"alarm {name}: {reading.value:.4g} is {side} {reading.limit:.4g}{steps}{then}"
