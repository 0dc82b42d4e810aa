from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.tracking.histogram import Histogram, histogram_metrics, take_histograms


@given(st.lists(st.integers(0, 1000).map(float), min_size=1, max_size=30))
def test_what_is_split_into_cells_is_put_together_again(counts: list[float]) -> None:
    metrics = {f"acceptance/{key}": value for key, value in histogram_metrics(counts).items()} | {"reward": 0.5}
    assert take_histograms(metrics) == ({"reward": 0.5}, {"acceptance": Histogram(counts)})


def test_edges_and_moments_by_hand() -> None:
    histogram = Histogram([2.0, 0.0, 0.0, 1.0])  # two values near .125, one near .875
    assert histogram.edges == [0.0, 0.25, 0.5, 0.75, 1.0]
    moments = histogram.moments()
    assert (moments["min"], moments["max"], moments["num"]) == (0.125, 0.875, 3.0)
    assert moments["sum"] == pytest.approx(1.125) and moments["sum_squares"] == pytest.approx(2 / 64 + 49 / 64)
