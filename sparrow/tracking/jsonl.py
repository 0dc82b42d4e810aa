"""metrics.jsonl and samples.jsonl in the run's directory: one JSON object a line, readable while the run goes on."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparrow.errors import UserError
from sparrow.whole_files import write_whole

_log = logging.getLogger(__name__)


class JsonlTracker:
    """Appends a line per step (metrics) or per rollout (samples), each with its `step`.

    The first line written after a start removes what the files hold from that step on: a run that is resumed from a
    checkpoint repeats the steps after it, and each step stays unique. Non-finite numbers are written as the strings
    "nan", "inf", "-inf", which JSON has no numbers for; `float()` reads them back.
    """

    def __init__(self) -> None:
        self._trimmed = False

    def start(self, run_dir: Path, config: dict[str, Any], run_id: str) -> None:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"run directory {run_dir}: {error}") from error
        self._metrics, self._samples = run_dir / "metrics.jsonl", run_dir / "samples.jsonl"
        self._trimmed = False

    def log_dict(self, metrics: Mapping[str, float], step: int) -> None:
        self._append(self._metrics, [{"step": step, **{name: float(value) for name, value in metrics.items()}}])

    def log_samples(self, rows: list[dict[str, Any]], step: int) -> None:
        self._append(self._samples, [{"step": step, **row} for row in rows])

    def close(self) -> None:
        """Each line was flushed when it was written."""

    def _append(self, path: Path, rows: list[dict[str, Any]]) -> None:
        if not self._trimmed:
            for stale in (self._metrics, self._samples):
                _keep_before(stale, rows[0]["step"] if rows else math.inf)
            self._trimmed = True
        lines = [json.dumps(_finite(row), ensure_ascii=False, allow_nan=False, default=str) + "\n" for row in rows]
        with path.open("ab") as file:
            # A disk that was full left half a line, which must not swallow this one.
            torn = file.tell() > 0 and _last_byte(path) != b"\n"
            file.write(_encoded(("\n" if torn else "") + "".join(lines)))


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The rows of such a file, also while it is written: an unfinished last line is left out. No file, no rows."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    rows, broken = [], 0
    for line in filter(None, lines[:-1]):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            broken += 1
    if broken:
        _log.warning("%s: skipped %d lines that are not JSON", path, broken)
    return rows


def _keep_before(path: Path, step: float) -> None:
    if not path.exists():
        return
    rows = [row for row in read_jsonl(path) if isinstance(row, dict) and type(row.get("step")) is int]
    kept = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows if row["step"] < step]
    write_whole(path, lambda part: part.write_bytes(_encoded("".join(kept))))


def _encoded(lines: str) -> bytes:
    """UTF-8; half of a surrogate pair, which it has no bytes for, becomes JSON's own escape."""
    return lines.encode("utf-8", errors="backslashreplace")


def _last_byte(path: Path) -> bytes:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read()


def _finite(value: Any) -> Any:
    """`value` with every non-finite float inside it as a string."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
