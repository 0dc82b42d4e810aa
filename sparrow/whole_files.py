"""Files that are the old one or the new one at every moment, also where the process is killed."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """`write` gets the path of a file beside it, which then takes its name."""
    part = file.with_name(f"{file.name}.part")
    write(part)
    os.replace(part, file)


def write_text(file: Path, text: str) -> None:
    """UTF-8."""
    write_whole(file, lambda part: part.write_text(text, encoding="utf-8"))


def write_csv(file: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Lines end as on Unix."""

    def write(part: Path) -> None:
        with part.open("w", newline="", encoding="utf-8") as handle:
            csv.writer(handle, lineterminator="\n").writerows([header, *rows])

    write_whole(file, write)
