"""Where the rows of a data set come from: local files, folders of them, what `datasets` saved to disk, or the hub."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparrow.components.table_files import SUFFIXES, Row, rows_of, suffix_of
from sparrow.errors import UserError

_SPLIT_NAMES = ("train", "test", "validation", "valid", "val", "dev")


@dataclass(frozen=True)
class Table:
    """A data set that can be read row by row, as often as wanted.

    Attributes:
        label: what messages call it.
        root: the folder or file that was asked for; None for one of the hub.
        files: what is read; none of a data set of the hub.
        read: its rows, each with the place it stands at; UserError for what cannot be read.
    """

    label: str
    root: Path | None
    files: tuple[Path, ...]
    read: Callable[[], Iterator[tuple[str, Row]]]

    def rows(self, limit: int | None = None) -> Iterator[tuple[str, Row]]:
        """The first `limit` rows; UserError where there is none."""
        count = 0
        for count, (where, row) in enumerate(self.read(), start=1):
            yield where, row
            if count == limit:
                return
        if count == 0:
            raise UserError(f"{self.label}: no rows in it")


def open_table(path: str, name: str | None = None, split: str | None = None, revision: str | None = None) -> Table:
    """The data set at a local path, else that of the hub.

    Args:
        path: a file (.parquet, .jsonl, .jsonl.gz, .json, .csv, .arrow), a folder of them or of `save_to_disk`, or the
            name of a data set of the hub.
        name: configuration; of a local folder a folder in it.
        split: of a local folder the files whose name, or folder, begins with it; needed where there are several. Where
            no name says a split, all is `train`.
        revision: of the hub.

    Raises:
        UserError: naming what is not there.
    """
    local = Path(path).expanduser()
    if local.is_file():
        return _table_of_files(local, [local])
    if local.is_dir():
        folder = local if name is None else local / name
        if not folder.is_dir():
            raise UserError(f"{local}: name: no folder {name!r} in it")
        if any((folder / mark).is_file() for mark in ("dataset_dict.json", "state.json")):
            return _saved(folder, split)
        return _table_of_files(folder, _data_files(folder, split))
    if not may_be_of_hub(path):
        raise UserError(f"{path}: no such file or folder")
    return _hub(path, name, split, revision)


def may_be_of_hub(path: str) -> bool:
    """Whether what is no local path can be the name of a data set of the hub."""
    return not path.startswith((".", "/", "~")) and path.count("/") <= 1 and not path.endswith(SUFFIXES)


def _data_files(folder: Path, split: str | None) -> list[Path]:
    found = sorted(file for file in folder.rglob("*") if file.is_file() and file.name.endswith(SUFFIXES))
    if not found:
        raise UserError(f"{folder}: no data files ({', '.join('*' + suffix for suffix in SUFFIXES)}) in this folder")
    paths = {file: file.relative_to(folder).as_posix() for file in found}
    there = [known for known in _SPLIT_NAMES if any(_is_of(known, path) for path in paths.values())]
    if split == "train" and not there:
        return found
    if split is not None:
        found = [file for file in found if _is_of(split, paths[file])]
        if not found:
            raise UserError(f"{folder}: split: no file of split {split!r}; there are {_few(list(paths.values()))}")
    elif len(there) > 1:
        raise UserError(f"{folder}: split: must be given, there are files of {', '.join(there)}")
    return found


def _is_of(split: str, path: str) -> bool:
    return re.search(rf"(^|/){re.escape(split)}([^a-zA-Z0-9/][^/]*)?(/|$)", path) is not None


def _few(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _table_of_files(root: Path, files: list[Path]) -> Table:
    kinds = {suffix_of(file) for file in files}
    if len(kinds) > 1:
        raise UserError(f"{root}: files of several kinds, {_few([str(file) for file in files])}; name one of them")

    def read() -> Iterator[tuple[str, Row]]:
        for file in files:
            yield from rows_of(file)

    return Table(str(root), root, tuple(files), read)


def _saved(folder: Path, split: str | None) -> Table:
    """Of `Dataset.save_to_disk`; its rows come through `datasets`, which knows indices and features."""
    from datasets import DatasetDict, load_from_disk

    try:
        loaded = load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: cannot be read as a saved data set: {error}") from error
    if isinstance(loaded, DatasetDict):
        loaded = _one_split(loaded, split, str(folder))
    files = tuple(sorted(folder.rglob("*.arrow")))
    return Table(str(folder), folder, files, lambda: _dataset_rows(loaded, str(folder)))


def _hub(path: str, name: str | None, split: str | None, revision: str | None) -> Table:
    from datasets import DatasetDict, load_dataset

    try:
        loaded = load_dataset(path, name, split=split, revision=revision)
    except (OSError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: no such local path, and the hub's data set cannot be had: {reason}") from error
    if isinstance(loaded, DatasetDict):
        loaded = _one_split(loaded, split, path)
    return Table(path, None, (), lambda: _dataset_rows(loaded, path))


def _one_split(splits: Any, split: str | None, label: str) -> Any:
    if split is None and len(splits) == 1:
        return next(iter(splits.values()))
    if split not in splits:
        given = "must be given" if split is None else f"no split {split!r}"
        raise UserError(f"{label}: split: {given}; there are {', '.join(splits)}")
    return splits[split]


def _dataset_rows(dataset: Any, label: str) -> Iterator[tuple[str, Row]]:
    for number, row in enumerate(dataset, start=1):
        yield f"{label}, row {number}", row
