"""The report as a tracker: a page in the run's folder that is never much older than the run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparrow.tracking.report.page import SAMPLES, render
from sparrow.tracking.report.run import read_run
from sparrow.whole_files import write_text

SHARE_OF_TIME = 0.05


class ReportTracker:
    """Writes `report.html` from what `JsonlTracker`, which stands before it in the list, has written.

    After a step where it is due, and at the end, however the run ends but by SIGKILL: then the page is that of a step
    some before, and `sparrow_report` makes one of all that was logged. The longer a page takes, the rarer it is, so
    that pages take at most a twentieth of the time.
    """

    def start(self, run_dir: Path, config: dict[str, Any], run_id: str) -> None:
        self._folder = run_dir
        self._due = 0.0

    def log_dict(self, metrics: Mapping[str, float], step: int) -> None:
        if time.monotonic() >= self._due:
            self._write()

    def close(self) -> None:
        if (self._folder / "metrics.jsonl").is_file():
            self._write()

    def _write(self) -> None:
        started = time.monotonic()
        page = self._folder / "report.html"
        write_text(page, render([read_run(self._folder, self._folder.name, SAMPLES)], time.time()))
        ended = time.monotonic()
        self._due = ended + (ended - started) / SHARE_OF_TIME
