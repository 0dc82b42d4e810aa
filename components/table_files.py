"""Rows of local files, parsed here and not by `datasets`, which copies each file into a cache and guesses types: a text
that looks like a date becomes one."""

from __future__ import annotations

import csv
import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from sparrow.errors import UserError

Row = dict[str, Any]
_BATCH_ROWS = 256
_MANY = 2**20


def suffix_of(file: Path) -> str:
    """What kind of file it is, by its name."""
    for suffix in SUFFIXES:
        if file.name.endswith(suffix):
            return suffix
    raise UserError(f"{file}: not a kind of file that can be read: {', '.join(SUFFIXES)}")


def rows_of(file: Path) -> Iterator[tuple[str, Row]]:
    """Its rows, each with the place it stands at; UserError for what cannot be read."""
    suffix = suffix_of(file)
    try:
        yield from _READERS[suffix](file)
    except UnicodeDecodeError as error:
        raise UserError(f"{file}: cannot be read as UTF-8 text: {error}") from error
    # zlib.error: a damaged .gz. OverflowError: a timestamp outside of the years that Python has.
    except (OSError, EOFError, OverflowError, zlib.error, pa.ArrowException, csv.Error) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{file}: cannot be read as {suffix[1:]}: {reason}") from error


def _json_lines(file: Path) -> Iterator[tuple[str, Row]]:
    with _text(file) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                where = f"{file}, line {number}"
                yield where, _object(_json(line, where), where)


def _json_file(file: Path) -> Iterator[tuple[str, Row]]:
    """A list of objects, one object, or one object a line under the wrong name, as many sets of the hub have it."""
    with _text(file) as text:
        start = text.read(_MANY).lstrip()
    if not start.startswith("[") and not _goes_on(start):
        yield from _json_lines(file)
        return
    with _text(file) as text:
        rows = _json(text.read(), str(file))
    if not isinstance(rows, list):
        yield str(file), _object(rows, str(file))
        return
    for number, row in enumerate(rows, start=1):
        where = f"{file}, item {number}"
        yield where, _object(row, where)


def _goes_on(text: str) -> bool:
    """Whether the first line holds no more than the beginning of an object."""
    line, end, _ = text.partition("\n")
    return bool(end) and line.startswith("{") and not line.rstrip().endswith("}")


def _csv_rows(file: Path) -> Iterator[tuple[str, Row]]:
    csv.field_size_limit(sys.maxsize)
    with file.open(encoding="utf-8-sig", newline="") as text:
        for number, row in enumerate(csv.DictReader(text, strict=True), start=1):
            if None in row or None in row.values():
                raise UserError(f"{file}, row {number}: not as many fields as the first line has")
            yield f"{file}, row {number}", row


def _parquet_rows(file: Path) -> Iterator[tuple[str, Row]]:
    with pq.ParquetFile(file) as table:
        yield from _numbered(file, table.iter_batches(batch_size=_BATCH_ROWS))


def _arrow_rows(file: Path) -> Iterator[tuple[str, Row]]:
    with pa.memory_map(str(file)) as source:
        stream = source.read(6) != b"ARROW1"
        source.seek(0)
        if stream:
            yield from _numbered(file, pa.ipc.open_stream(source))
            return
        reader = pa.ipc.open_file(source)
        yield from _numbered(file, (reader.get_batch(index) for index in range(reader.num_record_batches)))


def _numbered(file: Path, batches: Any) -> Iterator[tuple[str, Row]]:
    number = 0
    for batch in batches:
        for row in batch.to_pylist():
            number += 1
            yield f"{file}, row {number}", row


def _text(file: Path) -> IO[str]:
    if file.name.endswith(".gz"):
        return gzip.open(file, "rt", encoding="utf-8-sig")
    return file.open(encoding="utf-8-sig")


def _json(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    # ValueError: also an integer with more digits than Python parses. RecursionError: brackets nested thousands deep.
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not valid JSON: {error}") from error


def _object(row: Any, where: str) -> Row:
    if not isinstance(row, dict):
        raise UserError(f"{where}: expected a JSON object, got a {type(row).__name__}")
    return row


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Row]]]] = {
    ".parquet": _parquet_rows,
    ".jsonl": _json_lines,
    ".jsonl.gz": _json_lines,
    ".json": _json_file,
    ".csv": _csv_rows,
    ".arrow": _arrow_rows,
}
SUFFIXES = tuple(_READERS)
