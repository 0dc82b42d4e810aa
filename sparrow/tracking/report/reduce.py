"""Long series made short: a column for each few pixels, with the mean and the extremes of the steps it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparrow.tracking.report.metrics import Series

# About one for each pixel of a chart's width.
COLUMNS = 400


@dataclass(frozen=True)
class Columns:
    """C columns in the order of steps; a column without a finite value has NaN.

    Attributes:
        x_C: mean step.
        mean_C, low_C, high_C: over the finite values.
        most: steps in the fullest column; 1 means that nothing was put together.
    """

    x_C: np.ndarray
    mean_C: np.ndarray
    low_C: np.ndarray
    high_C: np.ndarray
    most: int


def reduce(series: Series, first: int, last: int, columns: int = COLUMNS) -> Columns:
    """Columns of equal width over the steps `first` to `last`; columns without a step are left out."""
    if not len(series):
        nothing = np.empty(0)
        return Columns(nothing, nothing, nothing, nothing, most=1)
    column_N = (series.steps_N - first) * columns // max(last - first + 1, columns)
    start_C = np.flatnonzero(np.diff(column_N, prepend=column_N[0] - 1))
    count_C = np.diff(start_C, append=len(series))
    finite_N = np.isfinite(series.values_N)
    finite_C = np.add.reduceat(finite_N.astype(np.int64), start_C)
    sum_C = np.add.reduceat(np.where(finite_N, series.values_N, 0.0), start_C)
    missing_C = finite_C == 0
    return Columns(
        x_C=np.add.reduceat(series.steps_N.astype(np.float64), start_C) / count_C,
        mean_C=np.where(missing_C, np.nan, sum_C / np.maximum(finite_C, 1)),
        low_C=_extreme(np.minimum, series.values_N, finite_N, start_C, missing_C),
        high_C=_extreme(np.maximum, series.values_N, finite_N, start_C, missing_C),
        most=int(count_C.max()),
    )


def _extreme(
    of: np.ufunc, values_N: np.ndarray, finite_N: np.ndarray, start_C: np.ndarray, missing_C: np.ndarray
) -> np.ndarray:
    neutral = np.inf if of is np.minimum else -np.inf
    extreme_C: np.ndarray = of.reduceat(np.where(finite_N, values_N, neutral), start_C)
    return np.where(missing_C, np.nan, extreme_C)


def aligned(parts: Sequence[Series]) -> list[Series]:
    """All at every step that one of them has, so that they can be stacked: 0 where a part has no finite value."""
    steps_N = np.unique(np.concatenate([part.steps_N for part in parts])) if parts else np.empty(0, dtype=np.int64)
    values_PN = np.zeros((len(parts), len(steps_N)))
    for value_N, part in zip(values_PN, parts, strict=True):
        value_N[np.searchsorted(steps_N, part.steps_N)] = np.where(np.isfinite(part.values_N), part.values_N, 0.0)
    return [Series(steps_N, value_N) for value_N in values_PN]


def smoothed(series: Series, window: int) -> Series:
    """Mean over the last `window` values up to each one, without those that are not finite."""
    finite_N = np.isfinite(series.values_N)
    total_N = _trailing(np.where(finite_N, series.values_N, 0.0), window)
    count_N = _trailing(finite_N.astype(np.float64), window)
    return Series(series.steps_N, np.where(count_N > 0, total_N / np.maximum(count_N, 1), np.nan))


def _trailing(values_N: np.ndarray, window: int) -> np.ndarray:
    """Sum over the last `window` values up to each one."""
    return np.convolve(values_N, np.ones(window))[: len(values_N)] if len(values_N) else values_N
