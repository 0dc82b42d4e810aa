"""metrics.jsonl as columns: a series for each metric, read in one pass while the run may still write."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Series:
    """Values of one metric at the N steps that have it, in the order of steps; NaN and infinities are kept."""

    steps_N: np.ndarray
    values_N: np.ndarray

    def __len__(self) -> int:
        return len(self.steps_N)

    @property
    def finite_M(self) -> np.ndarray:
        """The values that are finite."""
        return self.values_N[np.isfinite(self.values_N)]

    @property
    def last(self) -> float:
        """The value at the last step that has one, NaN where no step has."""
        return float(self.values_N[-1]) if len(self) else float("nan")


# Larger whole numbers are no exact floats.
MOST_STEPS = 2**53

NO_SERIES = Series(np.empty(0, dtype=np.int64), np.empty(0))


@dataclass(frozen=True)
class Metrics:
    """All series of a run.

    Attributes:
        steps_N: the steps that have a line, each once.
        broken: lines that are no JSON object with a step; the unfinished last line is not among them.
    """

    series: dict[str, Series] = field(default_factory=dict)
    steps_N: np.ndarray = field(default_factory=lambda: NO_SERIES.steps_N)
    broken: int = 0

    def get(self, name: str) -> Series:
        """The series of that name, empty where the run has none."""
        return self.series.get(name, NO_SERIES)

    def below(self, prefix: str) -> dict[str, Series]:
        """The series whose names begin with `prefix`, by the rest of the name, in the order of the file."""
        return {name.removeprefix(prefix): found for name, found in self.series.items() if name.startswith(prefix)}

    def bins(self, prefix: str) -> dict[int, Series]:
        """The same where the rest is a number, in the order of the numbers."""
        named = self.below(prefix).items()
        numbers = [(rest, series) for rest, series in named if rest.isdecimal() and len(rest) <= len(str(MOST_STEPS))]
        found = {int(rest): series for rest, series in numbers if int(rest) < MOST_STEPS}
        return dict(sorted(found.items()))


class _Rows:
    """Rows of the same names, one after the other in one array: most of a run's lines have the same few hundred."""

    def __init__(self) -> None:
        self.lines, self.values = array("q"), array("d")


def read_metrics(path: Path) -> Metrics:
    """Of two values for one step the later one counts, as after a resume. No file, no series."""
    groups: dict[tuple[str, ...], _Rows] = {}
    broken = 0
    for line, row in enumerate(_rows(path)):
        step = row.get("step") if isinstance(row, dict) else None
        if type(step) is not int or abs(step) > MOST_STEPS:
            broken += 1
            continue
        names, values = _numbers(row)
        group = groups.setdefault(names, _Rows())
        group.lines.append(line)
        group.values.extend(values)
    return _columns(groups, broken)


def _numbers(row: dict[str, Any]) -> tuple[tuple[str, ...], array[float]]:
    """Names and values of what is a number; JSON has no NaN and no infinity, the tracker writes them as strings."""
    try:
        return tuple(row), array("d", row.values())
    except (TypeError, OverflowError):
        found = {name: _number(value) for name, value in row.items()}
        kept = {name: value for name, value in found.items() if value is not None}
        return tuple(kept), array("d", kept.values())


def _columns(groups: dict[tuple[str, ...], _Rows], broken: int) -> Metrics:
    parts: dict[str, list[tuple[np.ndarray, np.ndarray, np.ndarray]]] = {}
    for names, rows in groups.items():
        lines_N, values_NK = np.asarray(rows.lines), np.asarray(rows.values).reshape(-1, len(names))
        steps_N = values_NK[:, names.index("step")].astype(np.int64)
        for k, name in enumerate(names):
            parts.setdefault(name, []).append((steps_N, lines_N, values_NK[:, k]))
    series = {name: _in_order(*map(np.concatenate, zip(*found, strict=True))) for name, found in parts.items()}
    steps = series.pop("step", NO_SERIES)
    return Metrics(series, steps.steps_N, broken)


def _rows(path: Path) -> Iterator[Any]:
    """A value for each line that ends, None where it is not JSON: the last line of a killed run may not end."""
    if path.exists():
        with path.open("rb") as file:
            yield from (parse_line(line) for line in file if line.endswith(b"\n") and line.strip())


def parse_line(line: bytes) -> Any:
    """The value of a JSON line, or None where it is none."""
    try:
        return json.loads(line.decode("utf-8", errors="replace"))
    except (ValueError, RecursionError):
        return None


def _number(value: Any) -> float | None:
    if isinstance(value, int) and abs(value) > MOST_STEPS:
        return None
    return float(value) if isinstance(value, int | float) or value in ("nan", "inf", "-inf") else None


def _in_order(steps_N: np.ndarray, lines_N: np.ndarray, values_N: np.ndarray) -> Series:
    order_N = np.lexsort((lines_N, steps_N))
    last_N = np.diff(steps_N[order_N], append=MOST_STEPS + 1) > 0
    return Series(steps_N[order_N][last_N], values_N[order_N][last_N])
