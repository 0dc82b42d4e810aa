"""The line per step: what is on it, and that a file gets no colours."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from sparrow.tracking.stdout import StdoutTracker, duration

METRICS = {
    "loss": 0.1,
    "reward": 0.53125,
    "acceptance/p5": 0.8412,
    "acceptance/tau": 0.86,
    "completions/mean_length": 183.4,
    "budget/kv_read_ratio": 0.456,
    "time/step": 3.21,
}


def test_a_full_line(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = StdoutTracker(steps=40)
    tracker.start(Path("runs/a"), {}, "abc")
    tracker.log_dict(METRICS, 12)
    tracker.log_samples([{"text": "not shown"}], 12)
    tracker.close()
    assert capsys.readouterr().out == (
        "run abc in runs/a\nstep 12/40  reward 0.531  p5 0.841  length 183  kv 46%  3.2s  eta 1m30s\n"
    )


def test_what_is_missing_is_left_out_and_validation_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    StdoutTracker().log_dict({"reward": float("nan"), "val/mean@4": 0.25, "val/pass@4": 0.5}, 3)
    assert capsys.readouterr().out == "step 3  reward nan  val/mean@4 0.250\n"


def test_the_eta_averages_recent_steps_and_ends_with_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    tracker = StdoutTracker(steps=102)
    for step in range(1, 103):
        tracker.log_dict({"time/step": 100.0 if step <= 80 else 2.0}, step)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step   1/102  100.0s  eta 2h48m"
    assert lines[99] == "step 100/102  2.0s  eta 4s"
    assert lines[101] == "step 102/102  2.0s"


@pytest.mark.parametrize(
    ("terminal", "no_color", "p5", "red"),
    [(True, False, 0.84, True), (True, False, 0.87, False), (True, True, 0.84, False), (False, False, 0.84, False)],
)
def test_p5_below_tau_is_red_on_a_terminal_only(
    terminal: bool,
    no_color: bool,
    p5: float,
    red: bool,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    StdoutTracker().log_dict(METRICS | {"acceptance/p5": p5}, 1)
    assert ("\033[31mp5 0.84" in capsys.readouterr().out) == red


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0s"), (59.4, "59s"), (59.6, "1m00s"), (3599.0, "59m59s"), (3723.4, "1h02m"), (360_000.0, "100h00m")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
