from __future__ import annotations

import math

import pytest

from sparrow.recipes.grpo_minibatches import combine_metrics


def test_metrics_of_minibatches_are_averaged_and_skipped_ones_counted() -> None:
    rows = [
        {"loss": 1.0, "clip_ratio/low": 0.5, "update/skipped": 1.0},
        {"loss": 3.0, "clip_ratio/low": 0.0, "update/skipped": 1.0},
    ]
    assert combine_metrics(rows) == {"loss": 2.0, "clip_ratio/low": 0.25, "update/skipped": 2.0}
    assert combine_metrics([]) == {}


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_value_that_is_not_finite_shows(bad: float) -> None:
    assert not math.isfinite(combine_metrics([{"loss": 1.0}, {"loss": bad}, {"loss": 2.0}])["loss"])
