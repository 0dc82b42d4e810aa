"""The benchmark of the rewards, on a few answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench_rewards import main
from rewards_math import ordinary, pathological

from sparrow.components.math_answer import find_answer


def test_the_mathematics_benchmark_counts_what_it_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "math.json"
    assert main(["math", "--workers", "2", "--answers", "64", "--pathological", "3", "--out", str(out)]) == 0
    result = json.loads(out.read_text())["result"]
    counted = ("correct", "wrong", "no_answer", "timeout", "error")
    assert [sum(result[name][key] for key in counted) for name in ("ordinary", "pathological")] == [64, 3]
    assert result["ordinary"]["correct"] > 0 < result["ordinary"]["wrong"]
    assert "answers/s" in capsys.readouterr().out


def test_the_pathological_answers_differ_and_the_ordinary_ones_all_have_an_answer() -> None:
    assert len(set(pathological(200))) == 200
    completions, golds = ordinary(100)
    assert len(completions) == len(golds) == 100
    assert None not in [find_answer(text) for text in completions]
