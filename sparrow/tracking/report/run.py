"""A run as its folder has it: metrics, the newest samples, and where the run left them, its settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sparrow.errors import UserError
from sparrow.tracking.report.metrics import Metrics, read_metrics
from sparrow.tracking.report.samples import Samples, read_samples


@dataclass(frozen=True)
class Run:
    """`settings` are {dotted key: value}, empty where the folder has none; `written` is when metrics.jsonl grew last.

    `steps` is how many the settings ask for.
    """

    name: str
    metrics: Metrics
    samples: Samples
    settings: dict[str, Any]
    written: float

    @property
    def steps(self) -> int | None:
        steps = self.settings.get("steps")
        return steps if type(steps) is int else None


def read_run(folder: Path, name: str, samples: int) -> Run:
    """Reads a run that may still be going on.

    Args:
        folder: with metrics.jsonl in it, as `JsonlTracker` writes it.
        name: what the report calls it.
        samples: how many of its newest samples to take.

    Raises:
        UserError: the folder is not there, or is not that of a run.
    """
    metrics = folder / "metrics.jsonl"
    if not folder.is_dir():
        raise UserError(f"--run {folder}: there is no such folder")
    if not metrics.is_file():
        raise UserError(f"--run {folder}: no metrics.jsonl in it{_runs_below(folder)}")
    try:
        return Run(
            name,
            read_metrics(metrics),
            read_samples(folder / "samples.jsonl", samples),
            _settings(folder),
            metrics.stat().st_mtime,
        )
    except OSError as error:
        raise UserError(f"--run {folder}: {error}") from error


def _runs_below(folder: Path) -> str:
    runs = sorted(path.parent.name for path in folder.glob("*/metrics.jsonl"))
    return f"; these folders in it have one: {', '.join(runs[:5])}" if runs else ", so it is not the folder of a run"


def _settings(folder: Path) -> dict[str, Any]:
    """The effective config, from the folder itself or from its newest save."""
    saves = sorted(folder.glob("checkpoints/step_*/config.yaml"), reverse=True)
    for file in (folder / "settings.yaml", folder / "config.yaml", *saves):
        if file.is_file():
            try:
                return flat(yaml.safe_load(file.read_text(encoding="utf-8", errors="replace")))
            except (yaml.YAMLError, ValueError, RecursionError):
                continue  # half written, or no config; an older save will do
    return {}


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": [1]}} -> {"a.b.0": 1}."""
    if isinstance(tree, dict):
        items: Any = tree.items()
    elif isinstance(tree, list):
        items = enumerate(tree)
    else:
        return {prefix: tree} if prefix else {}
    return {key: value for name, inner in items for key, value in flat(inner, f"{prefix}.{name}".lstrip(".")).items()}


def names(folders: list[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        found = ["/".join(part[-depth:]) for part in parts]
        if len(set(found)) == len(found):
            return found
    raise UserError("--run: the same folder is given twice")
