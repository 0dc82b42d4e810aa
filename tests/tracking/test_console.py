"""Seconds by phase, a line a minute in a log, a bar on a real terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparrow.tracking.console import PhaseConsole


def test_seconds_add_up_by_phase_and_begin_anew() -> None:
    console = PhaseConsole(speaks=False)
    for _ in range(2):
        with console.phase("step"), console.phase("rollout", 3) as advance:
            advance(3, "")
            time.sleep(0.02)
    with pytest.raises(ValueError), console.phase("update"):
        raise ValueError
    seconds = console.take()
    assert list(seconds) == ["rollout", "step", "update"]
    assert 0.04 <= seconds["rollout"] <= seconds["step"]
    assert console.take() == {}
    console.close()


def test_a_log_has_a_line_now_and_then_that_names_phase_and_progress(capfd: pytest.CaptureFixture[str]) -> None:
    console = PhaseConsole(speaks=True, seconds_between_beats=0.05)
    console.step = 7
    time.sleep(0.12)  # no phase, nothing to say
    assert capfd.readouterr().err == ""
    with console.phase("validation"), console.phase("rollout", 64) as advance:
        advance(12, "3,400 tokens")
        time.sleep(0.12)
    console.close()
    time.sleep(0.1)
    lines = capfd.readouterr().err.splitlines()
    assert lines and all("  step 7: validation for 0s; rollout for 0s, 12 of 64, 3,400 tokens" in x for x in lines)


def test_a_rank_that_does_not_speak_is_silent(capfd: pytest.CaptureFixture[str]) -> None:
    console = PhaseConsole(speaks=False, seconds_between_beats=0.02)
    with console.phase("rollout", 64):
        time.sleep(0.1)
    console.close()
    assert capfd.readouterr() == ("", "")


PROGRAM = """
import time
from pathlib import Path
from sparrow.tracking.console import PhaseConsole
console = PhaseConsole(speaks=True, seconds_between_beats=0.05)
with console.phase("rollout", 4) as advance:
    for done in range(5):
        advance(done, f"{done} tokens")
        time.sleep(0.2)
console.close()
print("after")
"""


def test_a_terminal_has_a_bar_and_no_lines() -> None:
    """A pseudo-terminal, as a user's shell gives one."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120"}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        output = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # Linux says so when the other end is closed.
                break
            output += part
    os.close(ours)
    assert process.returncode == 0
    assert b"rollout" in output and b"4 tokens" in output and b"step 0" in output
    assert b"rollout for" not in output, "beats are for logs"
    assert output.rstrip().endswith(b"after")


def test_a_terminal_that_goes_away_takes_the_bar_only(tmp_path: Path) -> None:
    """As after nohup or disown: SIGHUP is ignored, and the other end is closed."""
    ours, theirs = pty.openpty()
    program = f"import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n{PROGRAM}".replace(
        'print("after")', f"open({str(tmp_path / 'after')!r}, 'w').write('done')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.DEVNULL, stderr=theirs, start_new_session=True
    ) as process:
        os.close(theirs)
        os.read(ours, 1)
        os.close(ours)
    assert process.returncode == 0 and (tmp_path / "after").read_text() == "done"


def test_a_line_that_cannot_be_written_is_no_error() -> None:
    code = "from sparrow.tracking.console import say; say('x'); print('on')"
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=full, text=True)
    assert done.stdout == "on\n"
