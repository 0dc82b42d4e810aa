"""The files of a calibration: each is written under a temporary name and renamed, so that what is there is complete."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from sparrow.errors import UserError
from sparrow.recipes.calibrate_measure import Trajectories
from sparrow.recipes.calibrate_surface import Cell, Measured

SURFACE = ("page_size", "bin_start", "budget_pages", "p5", "p5_low", "p5_high", "tokens")


class Results:
    """What has been measured in a folder, under one set of settings.

    Args:
        folder: made if need be.
        settings: what the measurements depend on, by dotted key.

    Raises:
        UserError: the folder holds measurements of other settings; says which keys differ.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, settings
        file = folder / "settings.json"
        if file.is_file():
            self._compare(file)

    def _compare(self, file: Path) -> None:
        before = json.loads(file.read_text(encoding="utf-8"))
        names = [key for key in {**before, **self.settings} if before.get(key) != self.settings.get(key)]
        if names:
            changed = "; ".join(f"{key}: {before.get(key)!r} then, {self.settings.get(key)!r} now" for key in names)
            raise UserError(
                f"output_dir: {self.folder.parent} holds measurements of other settings ({changed}); another "
                "output_dir starts beside them"
            )

    def start(self) -> None:
        """Notes the settings; one process calls it, before the first `save`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.settings, indent=2) + "\n"
        write_whole(self.folder / "settings.json", lambda part: part.write_text(text, encoding="utf-8"))

    def has(self, mode: str, budget: int) -> bool:
        return self._file(mode, budget).is_file()

    def save(self, mode: str, budget: int, measured: Measured) -> None:
        write_whole(self._file(mode, budget), lambda part: torch.save(vars(measured), part))

    def load(self, mode: str, budget: int) -> Measured:
        return Measured(**_load(self._file(mode, budget)))

    def save_trajectories(self, trajectories: Trajectories) -> None:
        write_whole(self.folder / "trajectories.pt", lambda part: torch.save(vars(trajectories), part))

    def load_trajectories(self) -> Trajectories | None:
        """None where none were saved yet."""
        file = self.folder / "trajectories.pt"
        return Trajectories(**_load(file)) if file.is_file() else None

    def _file(self, mode: str, budget: int) -> Path:
        return self.folder / f"{mode}_{budget:05d}.pt"


def _load(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True)
    return content


def write_whole(file: Path, write: Callable[[Path], object]) -> None:
    """`write` gets a temporary path; `file` is the old one or the new one at every moment."""
    part = file.with_name(f"{file.name}.part")
    write(part)
    os.replace(part, file)


def write_surface(file: Path, cells: Iterable[Cell], page_size: int) -> None:
    """One row for each cell that has tokens, the columns `SURFACE`."""
    filled = [cell for cell in cells if cell.tokens]
    rows = [(page_size, c.bin_start, c.budget, *map(_figure, (c.p5, c.low, c.high)), c.tokens) for c in filled]
    write_csv(file, SURFACE, rows)


def write_csv(file: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    def write(part: Path) -> None:
        with part.open("w", newline="", encoding="utf-8") as handle:
            csv.writer(handle, lineterminator="\n").writerows([header, *rows])

    write_whole(file, write)


def _figure(value: float) -> str:
    return f"{value:.5f}"
