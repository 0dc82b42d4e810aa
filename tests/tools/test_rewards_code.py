"""The figures of the code reward, from real runs."""

from __future__ import annotations

from rewards_code import measure_code, show_code


def test_measures_and_shows() -> None:
    result = measure_code(runs=10, workers=[1, 2])
    assert [row["workers"] for row in result["by_workers"]] == [1, 2]
    assert 0 < result["to_first_line_ms"] <= result["program_ms"]
    assert "seccomp filter" in show_code(result) and "2 workers: " in show_code(result)
