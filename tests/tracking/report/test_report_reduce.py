"""Long series made short: against a loop over the steps of each column."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.tracking.report.axis import round_values, value_axis
from sparrow.tracking.report.metrics import Series
from sparrow.tracking.report.reduce import aligned, reduce, smoothed

values = st.floats(-1e6, 1e6) | st.sampled_from([math.nan, math.inf, -math.inf])


def series(points: dict[int, float]) -> Series:
    return Series(np.array(sorted(points)), np.array([points[step] for step in sorted(points)]))


@given(st.dictionaries(st.integers(0, 3000), values, min_size=1), st.integers(1, 50))
def test_columns_have_mean_and_extremes_of_their_steps(points: dict[int, float], count: int) -> None:
    found = reduce(series(points), 0, 3000, count)
    expected: dict[int, list[int]] = {}
    for step in sorted(points):
        expected.setdefault(step * count // 3001, []).append(step)
    assert len(found.x_C) == len(expected) <= count
    assert found.most == max(map(len, expected.values()))
    for c, steps in enumerate(expected.values()):
        finite = [points[step] for step in steps if math.isfinite(points[step])]
        assert found.x_C[c] == pytest.approx(np.mean(steps))
        if finite:
            assert found.mean_C[c] == pytest.approx(np.mean(finite), abs=1e-6)
            assert (found.low_C[c], found.high_C[c]) == (min(finite), max(finite))
        else:
            assert np.isnan([found.mean_C[c], found.low_C[c], found.high_C[c]]).all()


def test_a_short_run_keeps_every_step() -> None:
    found = reduce(series({3: 1.0, 4: math.nan, 9: 2.0}), 3, 9)
    np.testing.assert_array_equal(found.x_C, [3, 4, 9])
    np.testing.assert_array_equal(found.mean_C, [1.0, math.nan, 2.0])
    assert found.most == 1
    assert len(reduce(series({}), 0, 0).x_C) == 0


def test_smoothing_is_the_mean_of_what_is_finite() -> None:
    given_values = dict(enumerate([1.0, math.nan, 4.0, math.inf, 2.0]))
    np.testing.assert_allclose(smoothed(series(given_values), 2).values_N, [1.0, 1.0, 4.0, 4.0, 2.0])
    assert math.isnan(smoothed(series({0: math.nan}), 3).values_N[0])


def test_parts_of_a_stack_share_their_steps() -> None:
    a, b = aligned([series({1: 1.0, 2: math.nan}), series({2: 5.0, 7: 6.0})])
    assert a.steps_N.tolist() == b.steps_N.tolist() == [1, 2, 7]
    assert a.values_N.tolist() == [1, 0, 0] and b.values_N.tolist() == [0, 5, 6]


@given(st.lists(st.floats(allow_nan=True), max_size=20), st.booleans())
def test_an_axis_holds_any_values(numbers: list[float], log: bool) -> None:
    axis = value_axis([np.array(numbers)], (None, None), log, 200.0, 10.0)
    assert math.isfinite(axis.low) and math.isfinite(axis.high) and axis.low < axis.high
    places = axis.place(np.clip(np.array(numbers), -1e100, 1e100))
    assert ((places >= 5) & (places <= 205) | np.isnan(places)).all()
    assert len(axis.ticks(5)) <= 12


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (0.93, 0.97, [0.93, 0.94, 0.95, 0.96, 0.97]), (-3, 40, [0, 10, 20, 30, 40])],
)
def test_ticks_are_round(low: float, high: float, expected: list[float]) -> None:
    np.testing.assert_allclose(round_values(low, high, 5), expected)
