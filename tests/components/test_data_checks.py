"""What is dropped before the first step, and what is said about it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sparrow.components.arithmetic import ArithmeticProblems
from sparrow.components.data import Example, JsonlPrompts
from sparrow.components.data_checks import check_prompts
from sparrow.errors import UserError


def data_of(tmp_path: Path, *rows: dict[str, Any], **keys: Any) -> JsonlPrompts:
    file = tmp_path / "set.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return JsonlPrompts(str(file), **keys)


def characters(example: Example) -> list[int]:
    assert isinstance(example.prompt, str)
    return [ord(character) for character in example.prompt]


def bad_integers(columns: dict[str, list[Any]]) -> list[str | None]:
    assert set(columns) == {"answer", "id", "prompts"} and len(columns["prompts"]) == len(columns["answer"])
    return [None if str(answer).isdigit() else f"{answer!r} is no integer" for answer in columns["answer"]]


ROWS = [
    {"id": "a", "prompt": "four", "answer": "1"},
    {"id": "b", "prompt": "too long", "answer": "x"},
    {"id": "c", "prompt": "abcde", "answer": "y"},
    {"id": None, "prompt": "abcdef", "answer": "2"},
    {"id": "e", "prompt": "ok", "answer": 3},
]


def test_long_prompts_and_bad_golds_go_before_the_shuffle(tmp_path: Path) -> None:
    data = data_of(tmp_path, *ROWS, shuffle_seed=4)
    report = check_prompts(data, characters, 5, bad_integers)
    assert [example.prompt for example in data.examples()] == ["four", "ok"]
    assert (report.total, report.kept) == (5, 2)
    # A prompt that is too long is not asked about.
    assert report.too_long == [("b", 8), ("3", 6)]
    assert report.bad_gold == [("c", "'y' is no integer")]
    assert report.lines() == [
        "2 of 5 prompts dropped: above 5 tokens, the longest has 8: b (8), 3 (6)",
        "1 of 5 prompts dropped: gold answer unusable: c: 'y' is no integer",
        "2 prompts",
    ]
    without = data_of(tmp_path, ROWS[0], ROWS[4], shuffle_seed=4)
    assert [data.example(i).prompt for i in range(8)] == [without.example(i).prompt for i in range(8)]


def test_nothing_to_look_at(tmp_path: Path) -> None:
    data = data_of(tmp_path, *ROWS)
    report = check_prompts(data, characters, None, None)
    assert (report.kept, data.size, report.lines()) == (5, 5, ["5 prompts"])
    assert check_prompts(ArithmeticProblems(), characters, 1, bad_integers).lines() == []


def test_a_limit_is_allowed_itself(tmp_path: Path) -> None:
    assert check_prompts(data_of(tmp_path, ROWS[0]), characters, 4, None).kept == 1


def test_many_are_counted_and_few_are_shown(tmp_path: Path) -> None:
    rows = [{"prompt": "x" * size} for size in range(1, 10)]
    report = check_prompts(data_of(tmp_path, *rows), characters, 2, None)
    assert report.lines()[0].endswith("2 (3), 3 (4), 4 (5), and 4 more")


def test_an_empty_remainder_is_refused_and_says_why(tmp_path: Path) -> None:
    data = data_of(tmp_path, *ROWS[:3])
    with pytest.raises(
        UserError, match=r"no example is left: 2 of 3 prompts dropped: above 4 .*; 1 of 3 .*unusable: a"
    ):
        check_prompts(data, characters, 4, lambda columns: ["bad"] * len(columns["answer"]))
    assert data.size == 3


def test_every_example_needs_its_verdict(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="returned 1 values for 5 examples"):
        check_prompts(data_of(tmp_path, *ROWS), characters, None, lambda columns: [None])
