"""How the tools end: what is wrong with the input in one line, and figures in a file that says where they come from."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from sparrow.errors import UserError
from sparrow.training import distributed
from sparrow.whole_files import write_text


def exit_code(run: Callable[[], object]) -> int:
    """Runs it; 2, after a line on stderr, where the input was wrong."""
    try:
        run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def benchmark(run: Callable[[], dict[str, object]], out: Path | None, device: torch.device) -> int:
    """Runs it, and writes what it measured with command, machine, version and date; its exit code.

    Args:
        out: JSON file; None writes nothing. That it can be written shows before the measurement, not after it. Of
            several processes the first writes.
    """

    def measured() -> None:
        if out is not None:
            _make_room(out)
        figures = run()
        if out is not None and distributed.rank() == 0:
            origin = {"command": " ".join(sys.argv), "machine": machine(device), "torch": torch.__version__}
            write_json(out, {**origin, "date": time.strftime("%Y-%m-%d"), **figures})

    return exit_code(measured)


def machine(device: torch.device) -> str:
    """Its name."""
    return torch.cuda.get_device_name() if device.type == "cuda" else "CPU"


def _make_room(path: Path) -> None:
    if path.is_dir():
        raise UserError(f"--out {path}: is a folder; give a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {path}: {path.parent} cannot be made: {error.strerror}") from None


def write_json(path: Path, content: object) -> None:
    """Whole at every moment."""
    write_text(path, json.dumps(content, indent=1))
