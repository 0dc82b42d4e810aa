"""Measured launch options on disk: one JSON file of a user, to which several processes may add at once."""

from __future__ import annotations

import fcntl
import json
import os
import warnings
from pathlib import Path

from sparrow.errors import UserError
from sparrow.whole_files import write_text

Known = dict[str, list[int] | None]  # values of `LinearOptions`, None for the library's kernel


def cache_file() -> Path:
    """Where measured options are kept: $SPARROW_CACHE or the user's cache folder."""
    home = os.environ.get("SPARROW_CACHE") or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "sparrow" / "kernel_options.json"


def read_known(path: Path) -> Known:
    """What is on disk, nothing where there is no file; a file that may not be read warns, a damaged one is an error."""
    try:
        known: Known = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except OSError as error:
        warnings.warn(f"{path}: measured launch options cannot be read and are measured again: {error}", stacklevel=2)
        return {}
    except ValueError as error:
        raise UserError(f"{path}: launch options of the kernels, not readable as JSON ({error}); delete it") from error
    return known


def add_known(path: Path, measured: Known) -> None:
    """Adds to the file, which is replaced whole; where that is not allowed, warns and leaves it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Whoever reads, merges and replaces holds the lock, so that nobody's answers are lost.
        with path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            write_text(path, json.dumps(read_known(path) | measured, indent=0, sort_keys=True))
    except OSError as error:
        warnings.warn(
            f"{path}: measured launch options cannot be kept, the next run measures again ($SPARROW_CACHE names "
            f"another folder): {error}",
            stacklevel=2,
        )
