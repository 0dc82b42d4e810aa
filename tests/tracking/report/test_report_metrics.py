"""Columns of metrics.jsonl: whole lines only, each step once, and whatever else stands in the file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparrow.tracking.jsonl import JsonlTracker
from sparrow.tracking.report.metrics import read_metrics


def written(tmp_path: Path, *rows: Any, tail: str = "") -> Path:
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows) + tail)
    return file


def test_a_series_has_the_steps_that_have_the_metric(tmp_path: Path) -> None:
    metrics = read_metrics(
        written(tmp_path, {"step": 0, "val": 1}, {"step": 1, "a": 0.5}, {"step": 2, "a": 1, "val": 2})
    )
    assert metrics.get("a").steps_N.tolist() == [1, 2] and metrics.get("a").values_N.tolist() == [0.5, 1.0]
    assert metrics.get("val").steps_N.tolist() == [0, 2]
    assert metrics.steps_N.tolist() == [0, 1, 2]
    assert len(metrics.get("none")) == 0 and math.isnan(metrics.get("none").last)


def test_what_the_tracker_writes_is_read_back(tmp_path: Path) -> None:
    tracker = JsonlTracker()
    tracker.start(tmp_path, {}, "id")
    values = [0.25, math.nan, math.inf, -math.inf]
    for step, value in enumerate(values):
        tracker.log_dict({"a": value, "b": 1.0}, step)
    np.testing.assert_array_equal(read_metrics(tmp_path / "metrics.jsonl").get("a").values_N, values)


def test_the_later_line_of_a_step_counts_also_between_lines_of_other_names(tmp_path: Path) -> None:
    rows = [
        {"step": 1, "a": 1},
        {"step": 3, "a": 3, "b": 3},
        {"step": 2, "a": 2},
        {"step": 3, "a": 4},
        {"step": 1, "b": 9},
    ]
    metrics = read_metrics(written(tmp_path, *rows))
    assert metrics.get("a").steps_N.tolist() == [1, 2, 3] and metrics.get("a").values_N.tolist() == [1, 2, 4]
    assert metrics.get("b").values_N.tolist() == [9, 3]


@pytest.mark.parametrize("tail", ["", '{"step": 3, "a', '{"step": 3, "a": 1.0}', "\n\n"])
def test_an_unfinished_line_is_not_read(tmp_path: Path, tail: str) -> None:
    metrics = read_metrics(written(tmp_path, {"step": 1, "a": 1}, {"step": 2, "a": 2}, tail=tail))
    assert metrics.steps_N.tolist() == [1, 2] and metrics.broken == 0


def test_lines_that_are_no_row_are_counted_and_values_that_are_no_number_left_out(tmp_path: Path) -> None:
    bad: list[Any] = ["{oops", [1], 3, {"a": 1}, {"step": "2"}, {"step": True}, {"step": 10**30}, "[" * 100_000]
    good = {"step": 5, "a": "text", "b": None, "c": [1], "d": {}, "e": 10**400, "f": True, "g": 2.5}
    metrics = read_metrics(written(tmp_path, *bad, good))
    assert metrics.broken == len(bad)
    assert {name: series.last for name, series in metrics.series.items()} == {"f": 1.0, "g": 2.5}


def test_bins_are_ordered_by_number(tmp_path: Path) -> None:
    row = {"step": 1, "p_bin/1000": 1.0, "p_bin/0": 2.0, "p_bin/200": 3.0, "p_bin/x": 4.0, f"p_bin/{10**30}": 5.0}
    metrics = read_metrics(written(tmp_path, row))
    assert {start: series.last for start, series in metrics.bins("p_bin/").items()} == {0: 2.0, 200: 3.0, 1000: 1.0}
    assert list(metrics.bins("p_bin/")) == [0, 200, 1000]


def test_no_file_is_no_series(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "metrics.jsonl").series == {}
