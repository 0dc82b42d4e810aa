"""What a run is doing just now: seconds by phase, a live bar on a terminal, a line a minute anywhere else."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from sparrow.tracking.stdout import duration

SECONDS_BETWEEN_BEATS = 60.0

Advance = Callable[[float, str], None]  # how much is done, and what else there is to say


def say(line: str) -> None:
    """A line on stderr, if it can still be written: a full disk or a closed terminal must not end a run of days."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


@dataclass
class _Phase:
    name: str
    total: float | None
    started: float = field(default_factory=time.perf_counter)
    done: float = 0.0
    note: str = ""

    def line(self) -> str:
        words = [f"{self.name} for {duration(time.perf_counter() - self.started)}"]
        if self.total is not None:
            words.append(f"{self.done:,.0f} of {self.total:,.0f}")
        return ", ".join([*words, self.note] if self.note else words)


class PhaseConsole:
    """Names the phases of a run, one inside another, and tells how they get on.

    On a terminal a phase with a total has a live bar on stderr, which goes when the phase ends. Where stderr is no
    terminal there is one line a minute, so that a log shows where a run stands or hangs.

    Args:
        speaks: False on all ranks but the first.
        seconds_between_beats: of the lines.

    Attributes:
        seconds: by phase, those that ended since `take`.
    """

    def __init__(self, speaks: bool, seconds_between_beats: float = SECONDS_BETWEEN_BEATS) -> None:
        self.seconds: dict[str, float] = {}
        self.step = 0  # that is being worked on
        self._phases: list[_Phase] = []
        self._live = speaks and sys.stderr.isatty()
        self._closed = threading.Event()
        self._beats: threading.Thread | None = None
        if speaks and not self._live:
            self._beats = threading.Thread(target=self._beat, args=(seconds_between_beats,), daemon=True)
            self._beats.start()

    @contextmanager
    def phase(self, name: str, total: float | None = None) -> Iterator[Advance]:
        """The phase inside; its seconds are added up under its name, also where it fails.

        Yields a function that takes how much of `total` is done and a note (`1.2M tokens`).
        """
        phase = _Phase(name, total)
        self._phases.append(phase)
        try:
            with self._bar(phase) as show:

                def advance(done: float, note: str) -> None:
                    phase.done, phase.note = done, note
                    show()

                yield advance
        finally:
            self._phases.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - phase.started

    def take(self) -> dict[str, float]:
        """The seconds so far, which begin anew."""
        seconds, self.seconds = self.seconds, {}
        return seconds

    def close(self) -> None:
        """No beat after this."""
        self._closed.set()
        if self._beats is not None:
            self._beats.join()

    @contextmanager
    def _bar(self, phase: _Phase) -> Iterator[Callable[[], None]]:
        if not self._live or phase.total is None:
            yield lambda: None
            return
        # A tenth of a second of import that only a terminal should pay for.
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        names, notes = TextColumn("step {task.fields[step]}  {task.description}"), TextColumn("{task.fields[note]}")
        columns = (names, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), notes)
        bar = Progress(*columns, console=Console(stderr=True), transient=True)
        task = bar.add_task(phase.name, total=phase.total, note="", step=self.step)
        try:
            bar.start()
        except OSError:  # The terminal is gone, the run goes on.
            self._live = False
        try:
            yield lambda: bar.update(task, completed=phase.done, note=phase.note)
        finally:
            with suppress(OSError):
                bar.stop()

    def _beat(self, seconds: float) -> None:
        while not self._closed.wait(seconds):
            phases = list(self._phases)
            if phases:
                now = time.strftime("%H:%M:%S")
                what = "; ".join(phase.line() for phase in phases)
                say(f"{now}  step {self.step}: {what}")
