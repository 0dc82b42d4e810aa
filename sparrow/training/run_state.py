"""Run-state checkpoints that survive a kill at any moment: `step_000004/` is complete or not there at all.

A save is written to `step_000004.tmp`, sealed with a marker file that lists every file's size, and renamed. What
stands in it besides the marker is the caller's business.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from sparrow.errors import UserError

MARKER = "COMPLETE"
BEST = "best"  # a link to the best save, where some are kept for being the best
# `.old` is a save that was being replaced by one of the same step; it counts until its successor is in place.
_SAVE_NAME = re.compile(r"step_\d{6,}(\.old)?")


@dataclass(frozen=True)
class KeepBest:
    """Saves that stay whatever their age: those with the highest values of a metric."""

    metric: str
    count: int


def save_run_state(
    directory: Path,
    step: int,
    write: Callable[[Path], None],
    keep_last: int,
    best: KeepBest | None = None,
    value: float | None = None,
) -> Path:
    """Saves the state after `step` steps and prunes older saves; one process calls it, the others wait.

    Args:
        directory: holds all saves of the run, made if need be.
        step: optimizer steps done; a save of the same step is replaced.
        write: writes everything that is to be saved into the folder it is given.
        keep_last: complete saves that stay, this one included; the others are deleted.
        best: which saves stay besides; the link `directory/best` names the first of them.
        value: the metric of `best` at this step; None, and what is not finite, is never the best.

    Returns:
        The folder of the new save, `directory/step_000004` for step 4.

    Raises:
        UserError: `keep_last` below 1.
    """
    if keep_last < 1:
        raise UserError(f"keep_last must be at least 1, not {keep_last}")
    directory.mkdir(parents=True, exist_ok=True)
    for leftover in directory.glob("step_*.tmp"):
        shutil.rmtree(leftover)
    final = directory / f"step_{step:06d}"
    temporary = unfinished_save(directory, step)
    temporary.mkdir()
    write(temporary)
    _seal(temporary, step, {best.metric: value} if best is not None and _counts(value) else {})
    _put_in_place(temporary, final)
    for replaced in directory.glob("step_*.old"):
        _discard(replaced)
    kept = _best_saves(directory, best)
    _link(directory / BEST, kept[0] if kept else None)
    for outdated in _complete_saves(directory)[:-keep_last]:
        if outdated not in kept:
            _discard(outdated)
    return final


def would_be_kept(directory: Path, best: KeepBest, value: float | None) -> bool:
    """Whether a save with this value would now be among the best; equal values leave the older save its place."""
    values = [_value(save, best.metric) for save in _best_saves(directory, best)]
    return _counts(value) and (len(values) < best.count or value > values[-1])


def unfinished_save(directory: Path, step: int) -> Path:
    """The folder that `save_run_state` has written, for the processes that wait and add files of their own."""
    return directory / f"step_{step:06d}.tmp"


def latest_run_state(directory: Path) -> Path | None:
    """The complete save that was written last, or None; unfinished and damaged ones are passed over.

    Last in time, not the highest step: after resuming from an earlier save, the abandoned later ones do not count.
    """
    saves = _complete_saves(directory)
    return saves[-1] if saves else None


def resolve_resume(value: Path | str | None, directory: Path) -> Path | None:
    """The save to resume from.

    Args:
        value: None starts afresh; "auto" takes the newest complete save in `directory`, if there is one; anything
            else is the folder of one save.
        directory: where this run keeps its saves.

    Raises:
        UserError: `value` names a folder that is not a complete save.
    """
    if value is None:
        return None
    if value == "auto":
        return latest_run_state(directory)
    path = Path(value)
    if _read_marker(path) is None:
        newest = latest_run_state(directory)
        hint = f"the newest complete one is {newest}" if newest else f"there is no complete one in {directory}"
        raise UserError(f"resume: {path} is no complete run state (no {MARKER} file, or files differ from it); {hint}")
    return path


@contextmanager
def own_settings(optimizer: Any) -> Iterator[None]:
    """An optimizer whose state is loaded inside keeps the settings (betas, weight decay, ...) it was built with.

    `load_state_dict` puts the saved settings in the place of those of the config.
    """
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    yield
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def _complete_saves(directory: Path) -> list[Path]:
    """Complete saves, the one written last at the end."""
    if not directory.is_dir():
        return []
    markers = {path: _read_marker(path) for path in directory.iterdir() if _SAVE_NAME.fullmatch(path.name)}
    dated = sorted((marker["saved_at"], path) for path, marker in markers.items() if marker is not None)
    return [path for _, path in dated]


def _best_saves(directory: Path, best: KeepBest | None) -> list[Path]:
    """Complete saves to be kept for their value, the best and among equal ones the oldest first."""
    if best is None:
        return []
    valued = [save for save in _complete_saves(directory) if _value(save, best.metric) > -math.inf]
    return sorted(valued, key=lambda save: -_value(save, best.metric))[: best.count]


def _value(save: Path, metric: str) -> float:
    """The value of a complete save; -inf where it was made without."""
    marker = _read_marker(save)
    assert marker is not None
    return float(marker["values"].get(metric, -math.inf))


def _counts(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def _link(link: Path, save: Path | None) -> None:
    """Lets `link` name the save, or go."""
    if save is None:
        link.unlink(missing_ok=True)
        return
    temporary = link.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(save.name)
    os.replace(temporary, link)


def _read_marker(save: Path) -> dict[str, Any] | None:
    """The marker of a complete save; None if it is missing or some file is not as large as the marker says."""
    try:
        marker: dict[str, Any] = json.loads((save / MARKER).read_text(encoding="utf-8"))
        intact = all((save / name).stat().st_size == size for name, size in marker["sizes"].items())
    except (OSError, ValueError):
        return None
    return marker if intact else None


def _seal(save: Path, step: int, values: dict[str, float]) -> None:
    """Writes the marker, after everything it vouches for has reached the disk."""
    files = sorted(path for path in save.rglob("*") if path.is_file())
    for file in files:
        _flush(file)
    sizes = {file.relative_to(save).as_posix(): file.stat().st_size for file in files}
    marker = {"step": step, "saved_at": time.time_ns(), "values": values, "sizes": sizes}
    (save / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")
    _flush(save / MARKER)


def _flush(file: Path) -> None:
    with file.open("rb") as handle:
        os.fsync(handle.fileno())


def _put_in_place(temporary: Path, final: Path) -> None:
    """Renames; at every moment the old save of the same step or the new one counts as complete."""
    if _read_marker(final) is not None:
        aside = final.with_suffix(".old")
        if aside.exists():
            _discard(aside)
        os.rename(final, aside)
    elif final.exists():
        shutil.rmtree(final)
    os.rename(temporary, final)


def _discard(save: Path) -> None:
    """Deletes under a temporary name, so that a kill half-way leaves something the next save removes."""
    doomed = save.with_name(f"{save.name}.tmp")
    os.rename(save, doomed)
    shutil.rmtree(doomed)
