"""Shaping rewards, with values worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.components.shaping import LengthReward, RepetitionPenalty, SoftOverlong, ThinkFormat
from sparrow.errors import UserError


@pytest.mark.parametrize(
    ("text", "fits", "boxed"),
    [
        ("<think>a</think>4", 1.0, 0.0),
        ("a</think>\n\\boxed{4}", 1.0, 1.0),  # the template opened the thought
        ("  <think>a</think> \\boxed{\\frac{1}{2}} ", 1.0, 1.0),
        ("<think>\\boxed{4}</think>4", 1.0, 0.0),  # the box is in the thought
        ("<think>a</think>\\boxed{ }", 1.0, 0.0),
        ("<think>a</think>\\boxed{4", 1.0, 0.0),
        ("<think>a</think>  ", 0.0, 0.0),
        ("<think>a", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("4", 0.0, 0.0),
        ("<think>a</think>b</think>\\boxed{4}", 0.0, 0.0),
        ("<think>a<think>b</think>\\boxed{4}", 0.0, 0.0),
        ("<think>a</think><think>\\boxed{4}", 0.0, 0.0),
    ],
)
def test_one_closed_thought_and_an_answer(text: str, fits: float, boxed: float) -> None:
    assert ThinkFormat()([text], answer=["4"]) == [fits]
    assert ThinkFormat(boxed=True)([text]) == [boxed]


def test_soft_overlong_is_dapos_equation() -> None:
    reward = SoftOverlong(max_tokens=100, buffer_tokens=20)
    lengths = [0, 80, 85, 99, 100, 130]
    assert reward([""] * 6, completion_lengths=lengths) == pytest.approx([0, 0, -0.25, -0.95, -1, -1])


def test_short_responses_are_better_but_empty_and_truncated_ones_are_not() -> None:
    reward = LengthReward(short_tokens=10, long_tokens=30)
    texts, lengths = ["a", "a", "a", "a", " ", "a"], [5, 10, 20, 30, 1, 12]
    cut = [False] * 5 + [True]
    assert reward(texts, completion_lengths=lengths, truncated=cut) == [1.0, 1.0, 0.5, 0.0, 0.0, 0.0]


def test_repeated_ngrams() -> None:
    # "a b", "b a", "a b", "b a": two of four are new. Below two words there is no bigram.
    assert RepetitionPenalty(n=2)(["a b a b a", "a b c", "a", ""]) == [-0.5, 0.0, 0.0, 0.0]


@given(st.text(), st.integers(0, 200), st.booleans())
def test_all_stay_within_their_range(text: str, length: int, cut: bool) -> None:
    columns: dict[str, Any] = {"completion_lengths": [length], "truncated": [cut]}
    assert -1 <= SoftOverlong(100, 30)([text], **columns)[0] <= 0  # type: ignore[operator]
    assert 0 <= LengthReward(10, 50)([text], **columns)[0] <= 1  # type: ignore[operator]
    assert -1 < RepetitionPenalty(1)([text], **columns)[0] <= 0  # type: ignore[operator]


@pytest.mark.parametrize(
    "build",
    [
        lambda: SoftOverlong(100, 0),
        lambda: SoftOverlong(100, 101),
        lambda: LengthReward(30, 30),
        lambda: LengthReward(-1, 30),
        lambda: RepetitionPenalty(0),
    ],
)
def test_limits(build: Any) -> None:
    with pytest.raises(UserError, match="must be"):
        build()
