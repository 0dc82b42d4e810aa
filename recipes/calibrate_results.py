"""The files of a calibration: each is written under a temporary name and renamed, so that what is there is complete."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from sparrow.errors import UserError
from sparrow.recipes.calibrate_measure import Trajectories
from sparrow.recipes.calibrate_surface import Cell, Measured
from sparrow.whole_files import write_csv, write_text, write_whole

SURFACE = ("page_size", "bin_start", "budget_pages", "p5", "p5_low", "p5_high", "tokens")
# What a choice ends in. Before the next one these go, so that none stands beside a surface that it does not come from.
CHOSEN = ("schedule.yaml", "path.png", "held_out.csv", "agreement.csv")


class Results:
    """What has been measured in a folder, under one set of settings.

    Args:
        folder: made if need be.
        settings: what the measurements depend on, by dotted key; noted with the first measurement.

    Raises:
        UserError: the folder cannot be made, or holds measurements of other settings; says which keys differ.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = folder, settings
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"output_dir: {folder} cannot be made: {error.strerror}") from error
        if any(folder.glob("*.pt")):
            self._compare(folder / "settings.json")

    def _compare(self, file: Path) -> None:
        try:
            before = dict(json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"output_dir: {file} does not say which settings the measurements beside it have: {error}; remove "
                f"{self.folder}, or take another output_dir"
            ) from error
        names = [key for key in {**before, **self.settings} if before.get(key) != self.settings.get(key)]
        if names:
            changed = "; ".join(f"{key}: {before.get(key)!r} then, {self.settings.get(key)!r} now" for key in names)
            raise UserError(
                f"output_dir: {self.folder.parent} holds measurements of other settings ({changed}); another "
                "output_dir starts beside them"
            )

    def prompts(self, mode: str, budget: int) -> int:
        """How many of the data's first prompts are measured; 0 where none are."""
        file = self._file(mode, budget)
        return _load(file, _measurement)[0] if file.is_file() else 0

    def save(self, mode: str, budget: int, prompts: int, measured: Measured) -> None:
        """All tokens of the first `prompts` prompts."""
        self._write(self._file(mode, budget), {"prompts": prompts, **vars(measured)})

    def load(self, mode: str, budget: int) -> Measured:
        """The tokens of all prompts that were measured."""
        return _load(self._file(mode, budget), _measurement)[1]

    def save_trajectories(self, trajectories: Trajectories) -> None:
        self._write(self.folder / "trajectories.pt", vars(trajectories))

    def load_trajectories(self) -> Trajectories:
        """Without a sequence where none were saved yet."""
        file = self.folder / "trajectories.pt"
        none = torch.empty(0, dtype=torch.int64)
        return _load(file, Trajectories) if file.is_file() else Trajectories([], none, none)

    def _write(self, file: Path, content: dict[str, Any]) -> None:
        text = json.dumps(self.settings, indent=2) + "\n"
        write_text(self.folder / "settings.json", text)
        write_whole(file, lambda part: torch.save(content, part))

    def _file(self, mode: str, budget: int) -> Path:
        return self.folder / f"{mode}_{budget:05d}.pt"


def _measurement(prompts: int, **tokens: torch.Tensor) -> tuple[int, Measured]:
    return prompts, Measured(**tokens)


def _load(file: Path, kind: Callable[..., Any]) -> Any:
    try:
        return kind(**torch.load(file, map_location="cpu", weights_only=True))
    except (OSError, EOFError, RuntimeError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise UserError(
            f"output_dir: {file} is damaged or none of sparrow_calibrate's files; remove it, and the same command "
            "measures it anew"
        ) from error


def remove_chosen(folder: Path) -> None:
    """Removes what an earlier choice left, the second mode's surface included."""
    for name in (*CHOSEN, *(file.name for file in folder.glob("*_teacher_forced.*"))):
        (folder / name).unlink(missing_ok=True)


def write_surface(file: Path, cells: Iterable[Cell], page_size: int) -> None:
    """One row for each cell that has tokens, the columns `SURFACE`."""
    filled = [cell for cell in cells if cell.tokens]
    rows = [(page_size, c.bin_start, c.budget, *map(_figure, (c.p5, c.low, c.high)), c.tokens) for c in filled]
    write_csv(file, SURFACE, rows)


def _figure(value: float) -> str:
    return f"{value:.5f}"
