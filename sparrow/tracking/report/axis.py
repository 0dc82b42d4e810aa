"""The axes of a chart: range, round ticks, and the way from a value to a place."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

# What an axis can hold, so that differences and powers of ten stay finite.
SMALLEST, LARGEST = 1e-100, 1e100


@dataclass(frozen=True)
class Axis:
    """Maps values from `low` to `high` onto places from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def place(self, value_N: np.ndarray) -> np.ndarray:
        """NaN where a logarithmic axis has no place for the value."""
        if self.log:
            value_N = np.log10(np.where(value_N > 0, value_N, np.nan))
        share_N: np.ndarray = (value_N - self.low) / (self.high - self.low)
        return self.start + np.clip(share_N, -0.02, 1.02) * (self.end - self.start)

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """Places and labels of at most `most` or so round values."""
        if self.log:
            powers = np.arange(math.ceil(self.low), math.floor(self.high) + 1, max(1, round(self.high - self.low) // 4))
            values = [10.0**power for power in powers] if len(powers) > 1 else self._ends()
        else:
            values = round_values(self.low, self.high, most)
        return [(float(self.place(np.array(value))), tick_label(value)) for value in values]

    def _ends(self) -> list[float]:
        """A logarithmic axis within one power of ten: both ends and the middle."""
        places = (self.low + share * (self.high - self.low) for share in (0.05, 0.5, 0.95))
        return [float(f"{10**place:.2g}") for place in places]


def value_axis(
    values: Iterable[np.ndarray], bounds: tuple[float | None, float | None], log: bool, start: float, end: float
) -> Axis:
    """An axis with a little air around the finite values, or with the given bounds."""
    found = [array[np.isfinite(array) & ((array > 0) | (not log))] for array in values]
    all_N = np.clip(np.concatenate(found) if found else np.empty(0), -LARGEST, LARGEST)
    if not len(all_N):
        all_N = np.array([1.0, 10.0] if log else [0.0, 1.0])
    if log:
        all_N = np.log10(all_N)
    low = float(min(all_N.min(), np.inf if bounds[0] is None else bounds[0]))
    high = float(max(all_N.max(), -np.inf if bounds[1] is None else bounds[1]))
    # Rounding errors around a constant are no range.
    flat = high - low <= 1e-9 * max(abs(low), abs(high), SMALLEST)
    air = (0.05 * abs(high) or 0.5) if flat else 0.06 * (high - low)
    return Axis(low - air * (bounds[0] is None), high + air * (bounds[1] is None), start, end, log)


def step_axis(first: int, last: int, start: float, end: float) -> Axis:
    """An axis over steps; a single one stands in the middle."""
    return Axis(first, last, start, end) if last > first else Axis(first - 1, first + 1, start, end)


def round_values(low: float, high: float, most: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between the two."""
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    width = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    values = np.arange(math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9) + 1) * width
    return [float(value) + 0.0 for value in values]


def tick_label(value: float) -> str:
    """1200, 25k, 1.5M, 0.9."""
    if abs(value) >= 10_000:
        return f"{value / 1e6:.4g}M" if abs(value) >= 1e6 else f"{value / 1e3:.4g}k"
    return f"{value:.4g}"
