"""A page beside the logs, from the first step on, and again when the run ends."""

from __future__ import annotations

from pathlib import Path

from sparrow.tracking.jsonl import JsonlTracker
from sparrow.tracking.report.tracker import ReportTracker
from sparrow.tracking.tracker import SafeTrackers


def test_the_page_is_there_after_the_first_step_and_has_all_steps_at_the_end(tmp_path: Path) -> None:
    trackers = SafeTrackers([JsonlTracker(), ReportTracker()])
    trackers.start(tmp_path, {})
    page = tmp_path / "report.html"
    trackers.log_dict({"reward": 0.125}, 1)
    first = page.read_text()
    assert "0.125" in first and not list(tmp_path.glob("*.part"))
    trackers.log_dict({"reward": 0.875}, 2)
    trackers.close()
    assert "0.875" in page.read_text() and "0.875" not in first
    assert trackers.failures.total() == 0


def test_without_logs_there_is_nothing_to_say_and_nothing_fails(tmp_path: Path) -> None:
    trackers = SafeTrackers([ReportTracker()])
    trackers.start(tmp_path, {})
    trackers.close()
    assert not list(tmp_path.iterdir()) and trackers.failures.total() == 0


def test_a_config_or_a_sample_that_is_nonsense_costs_no_page(tmp_path: Path) -> None:
    sample = f'{{"step": 1, "prompt": "p", "response": "r", "reward": {10**400}, "rewards": {{"a": {10**400}}}}}\n'
    for settings in ("a: 2026-13-45", "a: 0x_", "a: &a [*a]", "[" * 5000):
        (tmp_path / "config.yaml").write_text(settings)
        trackers = SafeTrackers([JsonlTracker(), ReportTracker()])
        trackers.start(tmp_path, {})
        trackers.log_dict({"reward": 0.125, f"acceptance/p5_bin/{'9' * 5000}": 1.0}, 1)
        (tmp_path / "samples.jsonl").write_text(sample)
        trackers.close()
        assert trackers.failures.total() == 0, settings
        assert "0.125" in (tmp_path / "report.html").read_text()
