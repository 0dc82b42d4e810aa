"""The folder of one benchmark and mode: its samples so far, written window by window.

    lock             held by the process that writes the others
    settings.json    what the samples depend on
    samples.jsonl    one line a sample, ordered by prompt and sample
    figures.json     what came of them, once all are there
    windows.jsonl    one line a window that is complete: how long it took, what its reward counted

A window counts once its line in windows.jsonl is whole; what stands in samples.jsonl after the last one is dropped by
the next run, which makes it anew. The samples are thus the same however often the evaluation was interrupted.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from sparrow.errors import UserError
from sparrow.whole_files import write_text

_SETTINGS, _SAMPLES, _FIGURES = "settings.json", "samples.jsonl", "figures.json"


class SampleStore:
    """Opens or begins a folder, which is this process's own until `close` or its death.

    Args:
        folder: made if need be.
        settings: by dotted key.
        planned: how many windows there are in all.

    Attributes:
        windows: the complete ones, as they were given to `append`.

    Raises:
        UserError: the folder cannot be made, another process has it, its files are damaged, or its samples are of
            other settings; says which.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], planned: int) -> None:
        self.folder, self.settings = folder, settings
        self._settings, self._samples = folder / _SETTINGS, folder / _SAMPLES
        self._windows = folder / "windows.jsonl"
        self._lock = _locked(folder)
        try:
            self._open(planned)
        except UserError:
            self.close()
            raise

    def close(self) -> None:
        """Lets another process have the folder."""
        os.close(self._lock)

    def _open(self, planned: int) -> None:
        self.windows = self._complete()
        if self.windows:
            self._compare()
        else:
            _write(self._settings, self.settings)
        if len(self.windows) > planned:
            words = f"{self._windows} has {len(self.windows)} windows, there are {planned}"
            raise UserError(f"output_dir: {words}; {_remedy(self.folder)}")
        if len(self.windows) < planned:
            (self.folder / _FIGURES).unlink(missing_ok=True)
        self._truncate()

    def append(self, rows: Sequence[dict[str, Any]], window: dict[str, Any]) -> None:
        """Writes the samples of the next window, then that it is complete."""
        with self._samples.open("ab") as file:
            file.write(b"".join(_line(row) for row in rows))
            _reach_disk(file)
            end = file.tell()
        with self._windows.open("ab") as file:
            file.write(_line({**window, "samples_end": end}))
            _reach_disk(file)
        self.windows.append({**window, "samples_end": end})

    def finish(self, figures: dict[str, Any]) -> None:
        """Writes what came of all samples, for `figures_of`."""
        _write(self.folder / _FIGURES, figures)

    def samples(self) -> Iterator[dict[str, Any]]:
        """All of them, in order, without the texts, which can be gigabytes."""
        if self.windows:
            with self._samples.open("rb") as file:
                for line in file:
                    row = json.loads(line)
                    yield {key: value for key, value in row.items() if key not in ("prompt", "response")}

    def _complete(self) -> list[dict[str, Any]]:
        if not self._windows.is_file():
            return []
        lines = self._windows.read_bytes().split(b"\n")[:-1]
        try:
            windows = [dict(json.loads(line)) for line in lines]
            ends = [0, *(int(window["samples_end"]) for window in windows)]
            if any(last <= first for first, last in pairwise(ends)):
                raise ValueError(f"samples_end does not grow: {ends[1:]!s:.60}")
            end = ends[-1]
            enough = end == 0 or self._samples.stat().st_size >= end
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"output_dir: {self._windows} is damaged ({error}); {_remedy(self.folder)}") from error
        if not enough:
            raise UserError(f"output_dir: {self._samples} is shorter than {end} bytes; {_remedy(self.folder)}")
        return windows

    def _compare(self) -> None:
        try:
            before = dict(json.loads(self._settings.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(f"output_dir: {self._settings} cannot be read ({error}); {_remedy(self.folder)}") from error
        now = json.loads(json.dumps(self.settings))
        names = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        if names:
            changed = "; ".join(f"{key}: {before.get(key)!r} then, {now.get(key)!r} now" for key in names)
            raise UserError(
                f"output_dir: {self.folder} holds samples of other settings ({changed}); another output_dir starts "
                "beside them"
            )

    def _truncate(self) -> None:
        """Drops what a window that was cut short has left."""
        end = self.windows[-1]["samples_end"] if self.windows else 0
        whole = self._windows.read_bytes().rfind(b"\n") + 1 if self._windows.is_file() else 0
        for path, size in ((self._samples, end), (self._windows, whole)):
            if path.is_file():
                os.truncate(path, size)


def figures_of(folder: Path, settings: dict[str, Any]) -> dict[str, Any] | None:
    """What `finish` wrote, in this process or another; None where the folder has nothing, or other settings.

    Args:
        folder: of a benchmark and mode.
        settings: some of those of `SampleStore`.

    Raises:
        UserError: a file of it is damaged.
    """
    files = [folder / name for name in (_SETTINGS, _FIGURES, _SAMPLES)]
    if not all(file.is_file() for file in files):
        return None
    try:
        before, figures = (dict(json.loads(file.read_text(encoding="utf-8"))) for file in files[:2])
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"output_dir: {folder} has a damaged file ({error}); {_remedy(folder)}") from error
    now = json.loads(json.dumps(settings))
    return figures if before | now == before else None


def _write(path: Path, content: dict[str, Any]) -> None:
    write_text(path, json.dumps(content, indent=2) + "\n")


def _remedy(folder: Path) -> str:
    return f"remove {folder}, and the same command makes its samples anew"


def _locked(folder: Path) -> int:
    """The descriptor of the folder's lock, which goes with its process, however that ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise UserError(f"output_dir: {folder} cannot be made: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        busy = "another evaluation writes it now" if isinstance(error, BlockingIOError) else error.strerror
        raise UserError(f"output_dir: {folder} cannot be locked: {busy}") from error
    return lock


def _line(row: dict[str, Any]) -> bytes:
    # Half a surrogate pair is text for Python and for no encoding; an answer may hold one.
    return (json.dumps(row, ensure_ascii=False) + "\n").encode("utf-8", errors="replace")


def _reach_disk(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
