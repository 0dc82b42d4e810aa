"""One line a step on standard output."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Label, metric and format, in the order of the line.
_COLUMNS = (
    ("reward", "reward", "{:.3f}"),
    ("p5", "acceptance/p5", "{:.3f}"),
    ("length", "completions/mean_length", "{:.0f}"),
    ("kv", "budget/kv_read_ratio", "{:.0%}"),
    ("tok/s", "tokens_per_second", "{:,.0f}"),
    ("model", "speedup/model", "{:.2f}x"),
    ("measured", "speedup/measured", "{:.2f}x"),
    ("mem", "memory/peak_gib", "{:.1f}G"),
    ("", "time/step", "{:.1f}s"),
)
_RED = "\033[31m{}\033[0m"


class StdoutTracker:
    """`step 12/40  reward 0.531  p5 0.912  length 183  kv 46%  tok/s 9,120  model 2.31x  mem 97.2G  3.2s  eta 1m30s`.

    Metrics that a step lacks are left out. `kv` is the share of the cached keys and values that decoding read, `model`
    and `measured` how much faster than dense it is, by the cost model and by the clock (docs/tracking.md). On a
    terminal p5 turns red below `acceptance/tau`, unless NO_COLOR is set.

    Args:
        steps: total steps of the run, for the count and the ETA; in YAML an interpolation of the recipe's own key.
    """

    def __init__(self, steps: int | None = None) -> None:
        self._steps = steps
        self._seconds: deque[float] = deque(maxlen=20)

    def start(self, run_dir: Path, config: dict[str, Any], run_id: str) -> None:
        print(f"run {run_id} in {run_dir}", flush=True)

    def log_dict(self, metrics: Mapping[str, float], step: int) -> None:
        if "time/step" in metrics:
            self._seconds.append(metrics["time/step"])
        total = "" if self._steps is None else f"/{self._steps}"
        words = [f"step {step:>{max(len(total) - 1, 1)}}{total}"]
        words += [_word(label, metrics[key], form, metrics) for label, key, form in _COLUMNS if key in metrics]
        words += [f"{key} {value:.3f}" for key, value in metrics.items() if key.startswith("val/mean@")]
        if self._steps is not None and self._seconds and step < self._steps:
            words.append(f"eta {duration((self._steps - step) * sum(self._seconds) / len(self._seconds))}")
        print("  ".join(words), flush=True)

    def log_samples(self, rows: list[dict[str, Any]], step: int) -> None:
        """Samples do not fit on a line."""

    def close(self) -> None:
        sys.stdout.flush()


def duration(seconds: float) -> str:
    """3723.4 -> 1h02m, 83 -> 1m23s, 9.2 -> 9s."""
    whole = round(seconds)
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def _word(label: str, value: float, form: str, metrics: Mapping[str, float]) -> str:
    word = f"{label} {form.format(value)}".strip()
    below = label == "p5" and value < metrics.get("acceptance/tau", 0.0)
    return _RED.format(word) if below and sys.stdout.isatty() and "NO_COLOR" not in os.environ else word
