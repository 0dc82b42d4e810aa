"""What a preparation writes: examples, of which the doubtful are left out at the end, and a manifest that counts them.

Nothing in either depends on when, where or in which folder they were made: they are the same byte for byte.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import date, time
from pathlib import Path
from typing import Any

from sparrow.components.data import checked_prompt
from sparrow.components.duplicates import fingerprint, prompt_text
from sparrow.components.gold import UnusableGold
from sparrow.components.table_files import rows_of
from sparrow.components.tables import Table
from sparrow.errors import UserError
from sparrow.recipes.prepare_rows import Draft
from sparrow.whole_files import write_text

REASONS = {
    "listed": "named under drop",
    "dates": "outside of the days asked for",
    "unusable": "no usable question or gold answer",
    "repeated": "question that stood before, with the same gold answer",
    "conflicting": "question that stands with different gold answers",
    "excluded": "question of an evaluation set",
    "gold": "gold answer that the reward cannot use",
    "solution": "no solution of the data set scores 1",
}


@dataclass
class Ledger:
    """How many rows were read, and what became of them.

    Attributes:
        dropped: id, reason and details of what was left out, but for repeated questions.
    """

    read: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    dropped: list[tuple[str, str, str]] = field(default_factory=list)

    def drop(self, name: str, reason: str, detail: str = "") -> None:
        self.counts[reason] += 1
        if reason != "repeated":
            self.dropped.append((name, reason, detail))

    @property
    def kept(self) -> int:
        return self.read - self.counts.total()

    def lines(self, shown: int = 3) -> list[str]:
        """For the console: each reason with its count and the first ids."""
        lines = [f"{self.read} rows read, {self.kept} kept"]
        for reason, words in REASONS.items():
            examples = [f"{name}{detail and ': ' + detail}" for name, why, detail in self.dropped if why == reason]
            more = len(examples) - shown
            if self.counts[reason]:
                ids = "; ".join(examples[:shown]) + (f"; and {more} more" if more > 0 else "")
                lines.append(f"  {self.counts[reason]:6d} dropped: {words}{ids and ' (' + ids + ')'}")
        return lines


class ExamplesFile:
    """JSONL under a temporary name, until it is complete.

    Conflicting questions are known only at the end: each line is remembered by question, and left out of the copy that
    becomes the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._scratch = path, path.with_name(path.name + ".scratch")
        self._file = self._scratch.open("w", encoding="utf-8", newline="\n")
        self._lines: list[tuple[str, str]] = []

    def add(self, draft: Draft, line: str) -> None:
        self._file.write(line + "\n")
        self._lines.append((draft.id, draft.fingerprint))

    def finish(self, conflicting: set[str], ledger: Ledger) -> str:
        """Writes the file, and returns its SHA-256."""
        self._file.close()
        digest, part = hashlib.sha256(), self._path.with_name(self._path.name + ".part")
        with self._scratch.open("rb") as scratch, part.open("wb") as file:
            for (name, question), line in zip(self._lines, scratch, strict=True):
                if question in conflicting:
                    ledger.drop(name, "conflicting")
                else:
                    file.write(line)
                    digest.update(line)
        if ledger.kept == 0:
            part.unlink()
            raise UserError("no example is left: " + "; ".join(line.strip() for line in ledger.lines()))
        part.replace(self._path)
        return digest.hexdigest()

    def close(self) -> None:
        self._file.close()
        self._scratch.unlink(missing_ok=True)


def as_line(draft: Draft) -> str:
    """The example as a line, days and times as ISO text; UnusableGold names what JSON or UTF-8 has no place for."""
    return "{" + ", ".join(f"{json.dumps(name)}: {_text(name, value)}" for name, value in draft.row().items()) + "}"


def _text(column: str, value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_iso)
        text.encode("utf-8")
    except (TypeError, ValueError, RecursionError) as error:
        raise UnusableGold(f"{column}: cannot be written as JSON: {str(error)[:80]}") from error
    return text


def _iso(value: Any) -> str:
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    raise TypeError(f"{type(value).__name__} is no JSON")


def excluded_questions(paths: list[str]) -> set[str]:
    """Fingerprints of the questions of prepared sets; of a file without them, of its prompts."""
    return {mark for path in paths for mark in _fingerprints(Path(path).expanduser())}


def _fingerprints(path: Path) -> Iterator[str]:
    if not path.is_file():
        raise UserError(f"exclude: {path}: no such file")
    for where, row in rows_of(path):
        mark, prompt = row.get("fingerprint"), row.get("prompt")
        if mark is None and prompt is None:
            raise UserError(f"exclude: {where}: neither 'fingerprint' nor 'prompt'; there are {', '.join(row)}")
        if mark is None:
            mark = fingerprint(prompt_text(checked_prompt(prompt, f"exclude: {where}")))
        if not isinstance(mark, str):
            raise UserError(f"exclude: {where}: fingerprint: must be text, not {mark!r:.40}")
        yield mark


def source_files(table: Table) -> list[dict[str, Any]]:
    """Name, size and SHA-256 of each local file that was read."""
    root = table.root if table.root is not None and table.root.is_dir() else None
    names = {file: file.relative_to(root).as_posix() if root else file.name for file in table.files}
    return [{"name": names[file], "bytes": file.stat().st_size, "sha256": _sha256(file)} for file in table.files]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(path: Path, content: dict[str, Any], ledger: Ledger) -> None:
    """Beside the examples, as NAME.manifest.json."""
    counts = {"read": ledger.read, "kept": ledger.kept} | {reason: ledger.counts[reason] for reason in REASONS}
    dropped = [{"id": name, "reason": reason, "detail": detail} for name, reason, detail in ledger.dropped]
    text = json.dumps(content | {"counts": counts, "dropped": dropped}, indent=1, ensure_ascii=False)
    write_text(path, text + "\n")
