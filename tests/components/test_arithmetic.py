"""Sums and their reward, on honest, sloppy and hostile responses."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparrow.components.arithmetic import ArithmeticProblems, boxed_integer_reward
from sparrow.errors import UserError


@pytest.mark.parametrize("terms", [2, 3, 5])
def test_the_answer_is_the_sum_of_the_question(terms: int) -> None:
    data = ArithmeticProblems(terms=terms, max_value=20, seed=3)
    for index in range(200):
        example = data.example(index)
        assert isinstance(example.prompt, list)
        (message,) = example.prompt
        question = re.match(r"What is ([0-9 +]+)\?", message["content"])
        assert message["role"] == "user" and question is not None
        numbers = [int(number) for number in question[1].split(" + ")]
        assert len(numbers) == terms and all(1 <= number <= 20 for number in numbers)
        assert example.columns == {"answer": sum(numbers)}


def test_the_same_index_is_the_same_problem_and_another_seed_another_stream() -> None:
    data = ArithmeticProblems(seed=1)
    stream = [data.example(index) for index in range(50)]
    assert [ArithmeticProblems(seed=1).example(index) for index in reversed(range(50))] == stream[::-1]
    assert [ArithmeticProblems(seed=2).example(index) for index in range(50)] != stream
    assert data.size is None


@pytest.mark.parametrize("kwargs", [{"terms": 1}, {"max_value": 0}])
def test_sizes_that_are_refused(kwargs: dict[str, int]) -> None:
    with pytest.raises(UserError, match="terms >= 2 and max_value >= 1"):
        ArithmeticProblems(**kwargs)


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("So it is \\boxed{85}.", 85, 1.0),
        ("\\boxed{84}, no: \\boxed{ 85 }", 85, 1.0),
        ("\\boxed{85}, no: \\boxed{84}", 85, 0.0),
        ("\\boxed{1,234} or 7", 1234, 1.0),
        ("\\boxed{+085}", "85", 1.0),
        ("\\boxed{-7}", -7, 1.0),
        ("\\boxed{-0}", 0, 1.0),
        ("85 \\boxed{eighty-five}", 85, 0.0),
        ("\\boxed{47 + 38}", 85, 0.0),
        ("\\boxed{85", 85, 0.0),
        ("\\boxed{85.0}", 85, 0.0),
        ("47 + 38 = 85.", 85, 1.0),
        ("That is 1,234,567, I think", 1234567, 1.0),
        ("1, 85", 85, 1.0),
        ("12,34", 34, 1.0),
        ("95-10", 10, 1.0),
        ("it is -10", -10, 1.0),
        ("it is 0.85", 85, 0.0),
        ("٨٥", 85, 0.0),
        ("", 0, 0.0),
        ("nothing", 0, 0.0),
    ],
)
def test_reward(completion: str, answer: Any, reward: float) -> None:
    assert boxed_integer_reward([completion], [answer], other=[None]) == [reward]


def test_hostile_digits_are_compared_not_parsed() -> None:
    digits = "9" * 50_000
    texts = [f"\\boxed{{{digits}}}", digits, "\\boxed{" * 20_000, "1," * 50_000, "\\boxed{9**9**9**9}", "-" * 50_000]
    assert boxed_integer_reward(texts, [85] * 6) == [0.0] * 6
    assert boxed_integer_reward([digits], [digits]) == [1.0]


@pytest.mark.parametrize("answer", ["", "eighty-five", 85.5, None])
def test_an_answer_that_is_no_integer_is_an_error_not_a_zero(answer: Any) -> None:
    with pytest.raises(UserError, match="at index 1 is not an integer"):
        boxed_integer_reward(["", ""], [1, answer])


@given(st.text(alphabet="0123456789-+,. \\boxed{}", max_size=60), st.integers())
def test_only_a_text_with_the_digits_is_right(text: str, answer: int) -> None:
    (reward,) = boxed_integer_reward([text], [answer])
    assert reward == 0.0 or str(abs(answer)) in text.replace(",", "")


@given(st.integers())
def test_any_integer_in_a_box_is_read_back(answer: int) -> None:
    texts = [f"first 1, then \\boxed{{{answer}}} of 3", f"\\boxed{{{answer:,}}}", f"it is {answer:,}"]
    assert boxed_integer_reward(texts, [answer] * 3) == [1.0] * 3
