"""Histograms among the metrics: counts under `<name>/histogram/<cell>`, the cells of equal width from 0 to 1.

A step's metrics are numbers by name; so is a histogram, and a tracker that can draw one puts it together again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_MARK = "histogram/"


@dataclass(frozen=True)
class Histogram:
    """Counts of values in [0, 1]; the last cell holds 1 as well."""

    counts: list[float]

    @property
    def edges(self) -> list[float]:
        return [cell / len(self.counts) for cell in range(len(self.counts) + 1)]

    def moments(self) -> dict[str, float | list[float]]:
        """What TensorBoard wants to know of the values; each is taken as the middle of its cell."""
        middles = [(cell + 0.5) / len(self.counts) for cell in range(len(self.counts))]
        filled = [middle for middle, count in zip(middles, self.counts, strict=True) if count]
        return {
            "min": min(filled, default=0.0),
            "max": max(filled, default=0.0),
            "num": sum(self.counts),
            "sum": sum(count * middle for count, middle in zip(self.counts, middles, strict=True)),
            "sum_squares": sum(count * middle**2 for count, middle in zip(self.counts, middles, strict=True)),
            "bucket_counts": self.counts,
        }


def histogram_metrics(counts: list[float]) -> dict[str, float]:
    """A histogram as metrics, their names yet without that of what was counted."""
    return {f"{_MARK}{cell}": count for cell, count in enumerate(counts)}


def take_histograms(metrics: Mapping[str, float]) -> tuple[dict[str, float], dict[str, Histogram]]:
    """The metrics without the cells of histograms, and the histograms by name; a cell that is missing is empty."""
    scalars: dict[str, float] = {}
    cells: dict[str, dict[int, float]] = {}
    for key, value in metrics.items():
        name, mark, cell = key.partition(f"/{_MARK}")
        if mark:
            cells.setdefault(name, {})[int(cell)] = value
        else:
            scalars[key] = value
    return scalars, {
        name: Histogram([found.get(cell, 0.0) for cell in range(max(found) + 1)]) for name, found in cells.items()
    }
