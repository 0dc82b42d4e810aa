from __future__ import annotations

import math

import pytest
import torch

from sparrow.training.mismatch import mismatch_panel


def test_on_policy() -> None:
    logprobs_T = torch.tensor([-0.1, -2.0, -0.7, -30.0])
    panel = mismatch_panel(logprobs_T, logprobs_T, torch.tensor([0, 0, 1, 1]))
    ones = {f"sampling/importance_sampling_ratio/{name}" for name in ("min", "mean", "max")} | {"rollout_corr/ess"}
    for name, value in panel.items():
        if not name.endswith("ppl"):
            assert value == (1.0 if name in ones else 0.0), name
    assert panel["rollout_corr/rollout_ppl"] == panel["rollout_corr/training_ppl"]


def test_by_hand() -> None:
    # Sequence 0: rollout p = 1/2, 1/4; sequence 1: p = 1/2. Dense: p = 1/4, 1/4 and 1/8.
    rollout_T = torch.tensor([0.5, 0.25, 0.5], dtype=torch.float64).log()
    dense_T = torch.tensor([0.25, 0.25, 0.125], dtype=torch.float64).log()
    panel = mismatch_panel(rollout_T, dense_T, torch.tensor([7, 7, 3]))
    log2 = math.log(2)
    # Ratios 1/2, 1, 1/4: mean 7/12, squares 1/4 + 1 + 1/16 = 21/16, their mean 7/16. Log-ratios -1, 0, -2 times log 2.
    expected = {
        "sampling/importance_sampling_ratio/min": 0.25,
        "sampling/importance_sampling_ratio/mean": 7 / 12,
        "sampling/importance_sampling_ratio/max": 1.0,
        "rollout_corr/kl": log2,  # (1 + 0 + 2) / 3 log 2
        "rollout_corr/k3_kl": 7 / 12 - 1 + log2,
        "rollout_corr/ess": (7 / 12) ** 2 / (7 / 16),  # 7/9
        "rollout_corr/chi2_token": 7 / 16 - 1,
        "rollout_corr/rollout_ppl": (math.sqrt(8) + 2) / 2,  # exp(3/2 log 2) and 2
        "rollout_corr/training_ppl": (4 + 8) / 2,
        "engine/logprob_diff_mean": log2,
        "engine/logprob_diff_max": 2 * log2,
        "rollout_corr/nonfinite": 0.0,
    }
    # One ratio sits on the bound, where rounding decides; the next test counts.
    del panel["sampling/ratio_outside"]
    assert panel == pytest.approx(expected)


def test_ratio_outside_counts_both_sides() -> None:
    dense_T = torch.tensor([0.0, 0.8, -0.8, 0.6, -0.6])  # ratios 1, 2.2, .45, 1.8, .55
    panel = mismatch_panel(torch.zeros(5), dense_T, torch.zeros(5, dtype=torch.int64))
    assert panel["sampling/ratio_outside"] == pytest.approx(0.4)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("side", [0, 1])
def test_non_finite_tokens_are_counted_and_left_out(bad: float, side: int) -> None:
    rollout_T, dense_T = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.1, -1.8, -0.5])
    sequence_T = torch.tensor([0, 0, 1])
    clean = mismatch_panel(rollout_T, dense_T, sequence_T)
    columns = [torch.cat([torch.tensor([-1.0]), column]) for column in (rollout_T, dense_T)]
    columns[side][0] = bad
    panel = mismatch_panel(columns[0], columns[1], torch.tensor([1, 0, 0, 1]))
    assert panel.pop("rollout_corr/nonfinite") == 1.0
    assert panel == {name: clean[name] for name in panel}


@pytest.mark.parametrize("tokens", [0, 2])
def test_nothing_finite_is_nan_not_zero(tokens: int) -> None:
    panel = mismatch_panel(torch.full((tokens,), math.nan), torch.zeros(tokens), torch.zeros(tokens, dtype=torch.int64))
    assert panel.pop("rollout_corr/nonfinite") == tokens
    assert len(panel) == 12 and all(math.isnan(value) for value in panel.values())


def test_extreme_ratios_stay_finite_and_the_difference_is_not_clamped() -> None:
    panel = mismatch_panel(torch.tensor([-500.0, -1.0]), torch.tensor([-1.0, -500.0]), torch.tensor([0, 1]))
    assert panel["sampling/importance_sampling_ratio/max"] == pytest.approx(math.exp(20))
    assert panel["engine/logprob_diff_max"] == 499.0
    assert math.isfinite(panel["rollout_corr/chi2_token"])


def test_temperature_mistake_is_visible() -> None:
    """Complaint 1: rollout log-probs at T = 1 against dense ones at T = .6 must not read as on-policy."""
    logits_TV = 2 * torch.randn(4000, 8, generator=torch.Generator().manual_seed(0))
    dense_TV = torch.log_softmax(logits_TV / 0.6, -1)
    tokens_T = torch.multinomial(dense_TV.exp(), 1, generator=torch.Generator().manual_seed(1))
    dense_T = dense_TV.gather(-1, tokens_T)[:, 0]
    wrong_T = torch.log_softmax(logits_TV, -1).gather(-1, tokens_T)[:, 0]
    sequence_T = torch.zeros(4000, dtype=torch.int64)
    assert mismatch_panel(dense_T, dense_T, sequence_T)["sampling/importance_sampling_ratio/mean"] == 1.0
    assert mismatch_panel(wrong_T, dense_T, sequence_T)["sampling/importance_sampling_ratio/mean"] > 1.1
