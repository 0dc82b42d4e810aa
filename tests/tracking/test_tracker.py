"""The fan-out: everybody is told, and a tracker that fails stops nobody."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from sparrow.errors import UserError
from sparrow.tracking.tracker import SafeTrackers


class Recorder:
    """Keeps what it is told; raises in the methods it is told to."""

    def __init__(self, *failing: str, error: type[Exception] = RuntimeError) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._failing = failing
        self._error = error

    def _note(self, method: str, *args: Any) -> None:
        self.calls.append((method, *args))
        if method in self._failing:
            raise self._error("disk full")

    def start(self, run_dir: Path, config: dict[str, Any], run_id: str) -> None:
        self._note("start", run_id)

    def log_dict(self, metrics: Mapping[str, float], step: int) -> None:
        self._note("log_dict", dict(metrics), step)

    def log_samples(self, rows: list[dict[str, Any]], step: int) -> None:
        self._note("log_samples", rows, step)

    def close(self) -> None:
        self._note("close")


class MetricLogger:
    """What torchtune's metric loggers have in common."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def log_dict(self, payload: Mapping[str, float], step: int) -> None:
        self.steps.append(step)

    def close(self) -> None:
        self.steps.append(-1)


def run(trackers: SafeTrackers, run_id: str | None = None) -> None:
    trackers.start(Path("."), {}, run_id)
    for step in (1, 2):
        trackers.log_dict({"reward": 0.5}, step)
        trackers.log_samples([{"text": "a"}], step)
    trackers.close()


def test_everyone_is_told_everything_under_one_run_id() -> None:
    first, second = Recorder(), Recorder()
    trackers = SafeTrackers([first, second])
    run(trackers)
    run_id = trackers.state_dict()["run_id"]
    assert len(run_id) == 12
    assert first.calls == second.calls
    assert first.calls == [
        ("start", run_id),
        ("log_dict", {"reward": 0.5}, 1),
        ("log_samples", [{"text": "a"}], 1),
        ("log_dict", {"reward": 0.5}, 2),
        ("log_samples", [{"text": "a"}], 2),
        ("close",),
    ]


def test_the_run_id_survives_a_resume() -> None:
    trackers = SafeTrackers([])
    run(trackers)
    resumed = SafeTrackers([Recorder()])
    run(resumed, trackers.state_dict()["run_id"])
    assert resumed.state_dict() == trackers.state_dict()


def test_failures_are_reported_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    faulty, healthy = Recorder("log_dict", "log_samples", "close"), Recorder()
    trackers = SafeTrackers([faulty, healthy])
    with caplog.at_level(logging.WARNING):
        run(trackers)
    assert [record.getMessage() for record in caplog.records] == [
        "Recorder 0.log_dict failed, training goes on: RuntimeError: disk full",
        "Recorder 0 failed 5 times in this run",
    ]
    assert trackers.failures["Recorder 0"] == 5
    assert healthy.calls[1] == ("log_dict", {"reward": 0.5}, 1)
    assert healthy.calls[3] == ("log_dict", {"reward": 0.5, "tracking/failures": 2}, 2)


def test_a_tracker_that_cannot_start_is_left_out() -> None:
    faulty, healthy = Recorder("start"), Recorder()
    trackers = SafeTrackers([faulty, healthy])
    run(trackers)
    assert [call[0] for call in faulty.calls] == ["start"]
    assert trackers.failures.total() == 1
    assert len(healthy.calls) == 6


def test_what_the_user_can_mend_is_raised_at_the_start_only() -> None:
    with pytest.raises(UserError, match="disk full"):
        run(SafeTrackers([Recorder("start", error=UserError)]))
    run(SafeTrackers([Recorder("log_dict", error=UserError)]))


def test_interrupts_pass() -> None:
    with pytest.raises(KeyboardInterrupt):
        run(SafeTrackers([Recorder("log_dict", error=KeyboardInterrupt)]))  # type: ignore[arg-type]


def test_torchtunes_metric_loggers_can_stand_in_the_list() -> None:
    logger = MetricLogger()
    trackers = SafeTrackers([logger])  # type: ignore[list-item]
    run(trackers)
    assert logger.steps == [1, 2, -1]
    assert not trackers.failures
