from __future__ import annotations

from typing import Any

from sparrow.tracking.samples import flat_row, markdown

ROW: dict[str, Any] = {
    "prompt": "2+2?",
    "response": "four\n# not a heading",
    "reward": 0.5,
    "rewards": {"math": 1.0, "length": -0.5},
    "length": 3,
    "tokens": ["four", "\n", "#"],
    "alphas": [990, 120, -1],
    "omitted": 0,
    "lowest": [{"position": 1, "alpha": 0.12, "before": "four", "token": "\n", "after": "#"}],
}


def test_a_row_becomes_texts_and_numbers_with_the_lowest_token_marked() -> None:
    flat = flat_row(ROW)
    assert set(flat) == {
        "prompt", "response", "reward", "rewards/math", "rewards/length", "length", "lowest_alpha",
    }  # fmt: skip
    assert flat["rewards/length"] == -0.5
    assert flat["lowest_alpha"] == "0.120 at 1: 'four⟦\\n⟧#'"


def test_rows_of_a_version_without_tokens_pass() -> None:
    assert flat_row({"prompt": "a", "reward": 1.0}) == {"prompt": "a", "reward": 1.0}


def test_a_models_markup_stands_in_a_block() -> None:
    text = markdown(ROW)
    assert "\n    # not a heading" in text and "- reward: 0.5" in text and "**prompt**\n\n    2+2?" in text
