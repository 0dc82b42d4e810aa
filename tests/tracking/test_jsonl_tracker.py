"""The JSONL files: valid JSON whatever the values, unique steps over a resume, readable while they grow."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path

import pytest
import torch

from sparrow.errors import UserError
from sparrow.tracking.jsonl import JsonlTracker, read_jsonl


def started(run_dir: Path) -> JsonlTracker:
    tracker = JsonlTracker()
    tracker.start(run_dir, {}, "id")
    return tracker


def log_steps(tracker: JsonlTracker, steps: range, reward: float) -> None:
    for step in steps:
        tracker.log_dict({"reward": reward}, step)
        if step % 2 == 0:
            tracker.log_samples([{"text": f"{reward}"}, {"text": "é\n"}], step)


def test_each_line_is_there_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    tracker = started(tmp_path / "new" / "run")
    tracker.log_dict({"reward": 0.5, "lr": 1}, 1)
    tracker.log_samples([{"text": "é\n", "reward": None}, {"text": "b", "ids": [1, 2]}], 1)
    metrics = (tmp_path / "new" / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    assert metrics == '{"step": 1, "reward": 0.5, "lr": 1.0}\n'
    assert read_jsonl(tmp_path / "new" / "run" / "samples.jsonl") == [
        {"step": 1, "text": "é\n", "reward": None},
        {"step": 1, "text": "b", "ids": [1, 2]},
    ]


def test_values_that_are_not_finite_stay_valid_json(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.log_dict({"a": math.nan, "b": math.inf, "c": -math.inf, "d": torch.tensor(0.25)}, 1)  # type: ignore[dict-item]
    tracker.log_samples([{"reward": math.nan, "parts": {"x": [math.inf, 1.0]}, "path": Path("p")}], 1)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    line = (tmp_path / "metrics.jsonl").read_text()
    row = json.loads(line, parse_constant=refuse)
    assert row == {"step": 1, "a": "nan", "b": "inf", "c": "-inf", "d": 0.25}
    assert math.isnan(float(row["a"])) and float(row["c"]) == -math.inf
    sample = json.loads((tmp_path / "samples.jsonl").read_text(), parse_constant=refuse)
    assert sample == {"step": 1, "reward": "nan", "parts": {"x": ["inf", 1.0]}, "path": "p"}


def test_a_resumed_run_repeats_no_step(tmp_path: Path) -> None:
    log_steps(started(tmp_path), range(1, 8), reward=0.1)
    # Killed in the middle of a line; the checkpoint is from step 3.
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "rew')
    log_steps(started(tmp_path), range(4, 7), reward=0.2)
    metrics = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert [row["reward"] for row in metrics] == [0.1] * 3 + [0.2] * 3
    samples = read_jsonl(tmp_path / "samples.jsonl")
    assert [(row["step"], row["text"]) for row in samples[::2]] == [(2, "0.1"), (4, "0.2"), (6, "0.2")]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "samples.jsonl"]


def test_samples_after_the_resumed_step_go_even_if_none_are_logged_again(tmp_path: Path) -> None:
    log_steps(started(tmp_path), range(1, 5), reward=0.1)
    started(tmp_path).log_dict({"reward": 0.2}, 3)
    assert {row["step"] for row in read_jsonl(tmp_path / "samples.jsonl")} == {2}


def test_several_calls_in_one_step_all_stay(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.log_samples([], 5)
    tracker.log_dict({"val/mean@1": 0.5}, 5)
    tracker.log_dict({"reward": 0.5}, 5)
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 5, "val/mean@1": 0.5}, {"step": 5, "reward": 0.5}]


def test_reading_a_file_that_is_missing_unfinished_or_damaged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "metrics.jsonl"
    assert read_jsonl(file) == []
    file.write_text('{"step": 1}\n{"st')
    assert read_jsonl(file) == [{"step": 1}]
    assert caplog.records == []
    file.write_text('{"step": 1}\n{"st\n\n{"step": 2}\n')
    with caplog.at_level(logging.WARNING):
        assert read_jsonl(file) == [{"step": 1}, {"step": 2}]
    assert "skipped 1 lines that are not JSON" in caplog.text


def test_a_run_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run directory .*file"):
        started(tmp_path / "file")


def test_half_a_line_of_a_full_disk_does_not_swallow_the_next(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.log_dict({"reward": 0.5}, 1)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "rew')
    tracker.log_dict({"reward": 0.75}, 3)
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 3]


def test_odd_lines_and_half_a_surrogate_pair_cost_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"a": 1}\n[]\n{"step": "2"}\n7\n')
    tracker = started(tmp_path)
    tracker.log_dict({"reward": 0.5}, 2)
    assert read_jsonl(tmp_path / "metrics.jsonl") == [{"step": 1}, {"step": 2, "reward": 0.5}]
    tracker.log_samples([{"prompt": "a\ud800b"}, {"prompt": "é"}], 2)
    assert [row["prompt"] for row in read_jsonl(tmp_path / "samples.jsonl")] == ["a\ud800b", "é"]
    started(tmp_path).log_samples([{"prompt": "c"}], 3)
    assert [row["prompt"] for row in read_jsonl(tmp_path / "samples.jsonl")] == ["a\ud800b", "é", "c"]
