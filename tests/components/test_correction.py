from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.components.correction import ImportanceCorrection, NoCorrection
from sparrow.errors import UserError

# Ratios of three sequences: (1, 4), (1/4, 2), (1); products 4, 1/2, 1.
RATIOS = [1.0, 4.0, 0.25, 2.0, 1.0]
SEQUENCE_T = torch.tensor([0, 0, 1, 1, 2])


def weights(correction: ImportanceCorrection, ratios: list[float] = RATIOS) -> tuple[list[float], dict[str, float]]:
    rollout_T = torch.linspace(-3, -0.5, len(ratios), dtype=torch.float64)
    dense_T = rollout_T + torch.tensor(ratios, dtype=torch.float64).log()
    weights_T, metrics = correction(dense_T, rollout_T, SEQUENCE_T[: len(ratios)])
    return weights_T.tolist(), metrics


@pytest.mark.parametrize(
    ("level", "mode", "lower", "expected"),
    [
        ("token", "truncate", None, [1, 3, 0.25, 2, 1]),
        ("token", "truncate", 0.5, [1, 3, 0.5, 2, 1]),
        ("token", "mask", None, [1, 0, 0.25, 2, 1]),
        ("token", "mask", 0.5, [1, 0, 0, 2, 1]),
        ("sequence", "truncate", None, [3, 3, 0.5, 0.5, 1]),
        ("sequence", "truncate", 0.75, [3, 3, 0.75, 0.75, 1]),
        ("sequence", "mask", None, [0, 0, 0.5, 0.5, 1]),
        ("sequence", "mask", 0.75, [0, 0, 0, 0, 1]),
    ],
)
def test_by_hand(level: str, mode: str, lower: float | None, expected: list[float]) -> None:
    result, metrics = weights(ImportanceCorrection(level, mode, lower, upper=3.0))
    assert result == pytest.approx(expected)
    tokens_beyond = 1 if level == "token" else 2
    assert metrics == pytest.approx(
        {
            "rollout_corr/rollout_is_mean": sum(expected) / 5,
            "rollout_corr/rollout_is_ratio_fraction_high": tokens_beyond / 5,
            "rollout_corr/rollout_is_ratio_fraction_low": (tokens_beyond if lower else 0) / 5,
            "rollout_corr/rollout_rs_masked_fraction": expected.count(0) / 5,
            "rollout_corr/nonfinite_ratio": 0.0,
        }
    )


@pytest.mark.parametrize("mode", ["truncate", "mask"])
@pytest.mark.parametrize(
    ("dense", "rollout"), [(math.nan, -1.0), (-math.inf, -1.0), (-1.0, -math.inf), (-math.inf,) * 2]
)
def test_non_finite_ratios_weigh_nothing_and_are_counted(mode: str, dense: float, rollout: float) -> None:
    dense_T, rollout_T = torch.tensor([dense, -1.0, -2.0]), torch.tensor([rollout, -1.0, -2.0])
    sequence_T = torch.tensor([0, 0, 1])
    for level, expected in (("token", [0.0, 1.0, 1.0]), ("sequence", [0.0, 0.0, 1.0])):
        weights_T, metrics = ImportanceCorrection(level, mode, 0.5)(dense_T, rollout_T, sequence_T)
        assert weights_T.tolist() == expected
        assert metrics["rollout_corr/nonfinite_ratio"] == expected.count(0.0)
        assert metrics["rollout_corr/rollout_is_ratio_fraction_low"] == 0.0, "counted once"


def test_sequence_product_is_clamped() -> None:
    dense_T, rollout_T = torch.full((50,), -1.0), torch.full((50,), -11.0)
    one_T = torch.zeros(50, dtype=torch.int64)
    up, _ = ImportanceCorrection("sequence", "truncate", upper=1e30)(dense_T, rollout_T, one_T)
    down, _ = ImportanceCorrection("sequence", "truncate")(rollout_T, dense_T, one_T)
    assert up.tolist() == pytest.approx([math.exp(20)] * 50)
    assert down.tolist() == pytest.approx([math.exp(-20)] * 50)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-30, 30), min_size=1, max_size=5),
    st.sampled_from(["token", "sequence"]),
    st.sampled_from(["truncate", "mask"]),
    st.sampled_from([None, 0.5]),
)
def test_weights_stay_inside_the_bounds(logs: list[float], level: str, mode: str, lower: float | None) -> None:
    result, _ = weights(ImportanceCorrection(level, mode, lower, 2.0), [math.exp(value) for value in logs])
    for weight in result:
        assert (weight == 0.0 and mode == "mask") or (lower or 0.0) <= weight <= 2.0


def test_on_policy_weights_are_one_and_constant() -> None:
    logprobs_T = torch.tensor([-0.3, -2.0, -9.0], requires_grad=True)
    for level in ("token", "sequence"):
        weights_T, _ = ImportanceCorrection(level)(logprobs_T, logprobs_T.detach(), torch.tensor([0, 0, 1]))
        assert weights_T.tolist() == [1.0] * 3 and not weights_T.requires_grad


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_a_rank_without_tokens(level: str) -> None:
    weights_T, metrics = ImportanceCorrection(level)(torch.zeros(0), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    assert weights_T.shape == (0,) and metrics["rollout_corr/nonfinite_ratio"] == 0.0


def test_no_correction() -> None:
    weights_T, metrics = NoCorrection()(torch.tensor([-1.0, -9.0]), torch.tensor([-3.0, -1.0]), torch.tensor([0, 1]))
    assert weights_T.tolist() == [1.0, 1.0] and metrics == {}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": "batch"}, "level 'batch'"),
        ({"mode": "clip"}, "mode 'clip'"),
        ({"upper": 0.5}, "upper 0.5"),
        ({"lower": 1.5}, "lower 1.5"),
        ({"lower": -0.1}, "lower -0.1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        ImportanceCorrection(**arguments)
