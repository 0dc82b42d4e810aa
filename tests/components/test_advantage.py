from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.components.advantage import GroupAdvantage
from sparrow.errors import UserError

NAN = math.nan


def test_by_hand() -> None:
    # Group 5: rewards 1, 0, 0, 1: mean .5, deviations +-.5, unbiased variance 4 * .25 / 3, std .57735.
    rewards_S = torch.tensor([1.0, 0.0, 0.0, 1.0])
    groups_S = torch.full((4,), 5)
    result = GroupAdvantage(eps=1e-6)(rewards_S, groups_S)
    expected = 0.5 / (math.sqrt(1 / 3) + 1e-6)
    assert result.advantages_S.tolist() == pytest.approx([expected, -expected, -expected, expected])
    assert result.metrics == pytest.approx(
        {"reward": 0.5, "reward_std": math.sqrt(1 / 3), "frac_reward_zero_std": 0.0, "rewards/not_applicable": 0.0}
    )
    plain = GroupAdvantage(normalize_std=False)(rewards_S, groups_S)
    assert plain.advantages_S.tolist() == [0.5, -0.5, -0.5, 0.5]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.lists(st.one_of(st.just(NAN), st.integers(-3, 3)), min_size=2, max_size=6), min_size=1, max_size=5),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_against_the_statistics_module_in_any_order(groups: list[list[float]], normalize: bool, random: object) -> None:
    entries = [(group, reward) for group, rewards in enumerate(groups) for reward in rewards]
    random.shuffle(entries)  # type: ignore[attr-defined]
    index, rewards_S = torch.tensor([e[0] for e in entries]), torch.tensor([float(e[1]) for e in entries])
    result = GroupAdvantage(normalize)(rewards_S, index)
    for (group, reward), advantage in zip(entries, result.advantages_S.tolist(), strict=True):
        valid = [r for r in groups[group] if not math.isnan(r)]
        if math.isnan(reward) or len(set(valid)) < 2:
            assert advantage == 0.0
        else:
            scale = statistics.stdev(valid) + 1e-6 if normalize else 1.0
            assert advantage == pytest.approx((reward - statistics.fmean(valid)) / scale, rel=1e-5, abs=1e-6)
    valid = [r for _, r in entries if not math.isnan(r)]
    constant = [len({r for r in rewards if not math.isnan(r)}) < 2 for rewards in groups]
    assert result.metrics["reward"] == pytest.approx(statistics.fmean(valid) if valid else NAN, nan_ok=True)
    assert result.metrics["frac_reward_zero_std"] == pytest.approx(statistics.fmean(constant))
    assert result.metrics["rewards/not_applicable"] == len(entries) - len(valid)


def test_equal_rewards_give_exactly_zero() -> None:
    # Seven times .1 sums to an ulp away from .7, whose quotient by an equally small deviation would not be small.
    result = GroupAdvantage(eps=1e-20)(torch.full((7,), 0.1, dtype=torch.float64), torch.zeros(7, dtype=torch.int64))
    assert result.advantages_S.tolist() == [0.0] * 7
    assert result.metrics["frac_reward_zero_std"] == 1.0


def test_keep_and_drop_of_zero_variance_groups() -> None:
    """Complaint 11: which sequences stay in the denominators."""
    rewards_S = torch.tensor([1.0, 1.0, 0.0, 1.0, NAN, 1.0])
    groups_S = torch.tensor([0, 0, 1, 1, 1, 1])
    keep = GroupAdvantage(zero_variance="keep")(rewards_S, groups_S)
    drop = GroupAdvantage(zero_variance="drop")(rewards_S, groups_S)
    assert keep.keep_S.tolist() == [True] * 6
    assert drop.keep_S.tolist() == [False, False, True, True, False, True]
    assert torch.equal(keep.advantages_S, drop.advantages_S)
    assert keep.metrics == drop.metrics
    assert keep.metrics["frac_reward_zero_std"] == 0.5


def test_all_not_applicable_has_no_advantage_and_an_honest_mean() -> None:
    result = GroupAdvantage()(torch.full((4,), NAN), torch.tensor([0, 0, 1, 1]))
    assert result.advantages_S.tolist() == [0.0] * 4 and math.isnan(result.metrics["reward"])
    assert result.metrics["rewards/not_applicable"] == 4


def test_a_rank_may_have_no_sequences() -> None:
    result = GroupAdvantage()(torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert result.advantages_S.shape == result.keep_S.shape == (0,)


def test_bad_arguments() -> None:
    with pytest.raises(UserError, match="'refill' is neither"):
        GroupAdvantage(zero_variance="refill")
    with pytest.raises(UserError, match="eps 0"):
        GroupAdvantage(eps=0.0)
    with pytest.raises(UserError, match="num_samples 1"):
        GroupAdvantage()(torch.tensor([1.0, 0.0]), torch.tensor([0, 1]))
    with pytest.raises(UserError, match="inf is not finite"):
        GroupAdvantage()(torch.tensor([math.inf, 0.0]), torch.tensor([0, 0]))
