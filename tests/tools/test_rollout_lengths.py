"""Lengths of a queue: seeded, clipped, and of the distribution that is stated."""

from __future__ import annotations

import pytest
from rollout_lengths import LengthDistribution, LengthSummary

from sparrow.errors import UserError


@pytest.mark.parametrize("kind", ["thinking", "uniform", "longest"])
def test_draws_follow_the_seed_and_stay_within_their_bounds(kind):
    lengths = LengthDistribution(kind, 9000, 500, 32000)
    drawn = lengths.draw(4000, seed=1)
    assert drawn == lengths.draw(4000, seed=1)
    assert (drawn == lengths.draw(4000, seed=2)) == (kind == "longest")
    assert min(drawn) >= 500 and max(drawn) <= 32000


def test_thinking_is_the_clipped_log_normal():
    drawn = LengthDistribution("thinking", 9000, 500, 32000).draw(20_000, seed=0)
    summary = LengthSummary.of(drawn)
    # 9000 * exp(.75 * 1.6449) = 30,909; 32,000 is at 1.691 sigma, so 4.5 % of the draws are clipped there.
    assert summary.p50 == pytest.approx(9000, rel=0.03)
    assert summary.p95 == pytest.approx(30_909, rel=0.03)
    assert summary.longest == 32_000 and drawn.count(32_000) / 20_000 == pytest.approx(0.0454, abs=0.006)


def test_uniform_and_longest():
    assert LengthSummary.of(LengthDistribution("uniform", 50, 10, 90).draw(20_000, 0)).mean == pytest.approx(
        50, rel=0.02
    )
    assert LengthDistribution("longest", 50, 10, 90).draw(3, 0) == [90, 90, 90]


def test_the_summary_by_hand():
    # Of five, .95 lies .8 of the way from the fourth to the fifth.
    assert LengthSummary.of([1, 2, 3, 4, 9]) == LengthSummary(3.8, 3.0, pytest.approx(8.0), 9)


@pytest.mark.parametrize("bounds", [(9000, 500, 8000), (400, 500, 8000), (9, 0, 10)])
def test_bounds_that_do_not_ascend_are_refused(bounds):
    with pytest.raises(UserError, match="must ascend"):
        LengthDistribution("thinking", *bounds)
