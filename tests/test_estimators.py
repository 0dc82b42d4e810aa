"""The estimators against enumeration of all subsets, and what must hold whatever the rewards are."""

from __future__ import annotations

import math
import random
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.estimators import maj_at_k, majority, mean_reward, over_problems, pass_at_k, powers_of_two

REWARDS = st.lists(st.floats(-1, 2, width=32), min_size=1, max_size=9)


@given(REWARDS, st.data())
def test_pass_at_k_is_the_mean_over_all_subsets_of_their_best(rewards, data):
    k = data.draw(st.integers(1, len(rewards)))
    best = [max(subset) for subset in combinations(rewards, k)]
    assert pass_at_k(rewards, k) == pytest.approx(sum(best) / len(best), abs=1e-9)


@pytest.mark.parametrize(("n", "c"), [(n, c) for n in (1, 2, 5, 8) for c in range(n + 1)])
def test_of_zeros_and_ones_it_is_the_published_estimate(n, c):
    rewards = [1.0] * c + [0.0] * (n - c)
    for k in range(1, n + 1):
        assert pass_at_k(rewards, k) == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k), abs=1e-12)


@given(REWARDS)
def test_pass_at_k_starts_at_the_mean_grows_with_k_and_ends_at_the_best(rewards):
    values = [pass_at_k(rewards, k) for k in range(1, len(rewards) + 1)]
    assert values[0] == pytest.approx(mean_reward(rewards), abs=1e-9)
    assert values[-1] == pytest.approx(max(rewards), abs=1e-9)
    assert all(a <= b + 1e-9 for a, b in pairwise(values))


@given(REWARDS, st.randoms(use_true_random=False))
def test_the_order_of_samples_does_not_matter(rewards, generator):
    shuffled = list(rewards)
    generator.shuffle(shuffled)
    assert pass_at_k(rewards, len(rewards)) == pass_at_k(shuffled, len(rewards))
    assert mean_reward(shuffled) == pytest.approx(mean_reward(rewards))


def test_pass_at_k_of_very_many_samples_stays_finite():
    """C(20000, 5000) has thousands of digits."""
    rewards = [1.0] + [0.0] * 19999
    assert pass_at_k(rewards, 5000) == pytest.approx(0.25)
    assert pass_at_k(rewards, 20000) == 1.0


@pytest.mark.parametrize(
    ("answers", "rewards", "expected"),
    [
        (["3", "3", "4"], [1, 1, 0], 1.0),
        (["4", "3", "4"], [0, 1, 0], 0.0),
        (["3", "4"], [1, 0], 0.5),  # a tie: each wins half of the time
        (["3", "4", "5", "4", "3"], [1, 0, 0, 0, 1], 0.5),
        (["1", "2", "3", "4"], [0, 0, 1, 0], 0.25),
        ([None, None, None, "3"], [0, 0, 0, 1], 1.0),  # no answer never wins
        ([None, None], [0, 0], 0.0),
        (["3", "3", "4"], [1, 0, 0], 0.5),  # one of the two was not scored
        (["7"], [1], 1.0),
    ],
)
def test_majority(answers, rewards, expected):
    assert majority(answers, [float(reward) for reward in rewards]) == expected


@given(st.lists(st.tuples(st.sampled_from([None, "a", "b", "c"]), st.booleans()), min_size=1, max_size=8))
def test_the_majority_of_one_is_the_mean_and_all_values_are_shares(samples):
    answers, rewards = [a for a, _ in samples], [float(r) for _, r in samples]
    assert majority(answers[:1], rewards[:1]) == rewards[0]
    assert 0 <= majority(answers, rewards) <= 1


@given(st.lists(st.sampled_from(["a", "b", None]), min_size=1, max_size=7), st.randoms(use_true_random=False))
def test_ties_are_the_mean_over_random_tie_breaks(answers, generator):
    """Against drawing the winner: where the right answer is "a"."""
    rewards = [float(answer == "a") for answer in answers]
    votes = [answer for answer in answers if answer is not None]
    most = max((votes.count(answer) for answer in votes), default=0)
    winners = [answer for answer in dict.fromkeys(votes) if votes.count(answer) == most]
    expected = sum(answer == "a" for answer in winners) / len(winners) if winners else 0.0
    assert majority(answers, rewards) == expected


def test_maj_at_k_is_the_mean_over_blocks():
    answers, rewards = ["1", "2", "2", "1", "1", "2", "1"], [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0]
    assert maj_at_k(answers, rewards, 3) == 0.5  # 2 wins the first block, 1 the second, the last sample is left out
    assert maj_at_k(answers, rewards, 7) == majority(answers, rewards) == 1.0
    assert maj_at_k(answers, rewards, 1) == mean_reward(rewards)


@pytest.mark.parametrize(("n", "expected"), [(1, []), (2, [2]), (3, [2]), (8, [2, 4, 8]), (12, [2, 4, 8])])
def test_powers_of_two(n, expected):
    assert powers_of_two(n) == expected


def test_the_interval_of_thirty_problems():
    """Half of 30 solved: the normal approximation is .5 +- 1.96 * .5 / sqrt(30) = .5 +- .179."""
    estimate = over_problems([1.0, 0.0] * 15)
    assert estimate.value == 0.5
    assert estimate.low == pytest.approx(0.321, abs=0.03) and estimate.high == pytest.approx(0.679, abs=0.03)
    assert over_problems([1.0, 0.0] * 15) == estimate, "seeded"
    assert over_problems([0.0, 0.3] * 15, seed=1) != over_problems([0.0, 0.3] * 15, seed=2)


def test_intervals_of_one_problem_and_of_equal_ones():
    assert (over_problems([0.5]).low, over_problems([0.5]).high) == (None, None)
    assert vars(over_problems([1.0] * 4)) == {"value": 1.0, "low": 1.0, "high": 1.0}


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    """200 sets of 40 problems that are solved with probability .3: 95 % are promised, the bootstrap is a bit short."""
    generator = random.Random(0)
    covered = 0
    for trial in range(200):
        values = [float(generator.random() < 0.3) for _ in range(40)]
        estimate = over_problems(values, seed=trial)
        assert estimate.low is not None and estimate.high is not None
        covered += estimate.low <= 0.3 <= estimate.high
    assert 0.88 * 200 <= covered <= 0.99 * 200
