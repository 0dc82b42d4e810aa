"""The files that a run stands on, handed to its trackers: settings, budget schedule, calibration surface."""

from __future__ import annotations

import subprocess
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import torch
import yaml

from sparrow.components.budget import StepSchedule
from sparrow.components.schedule_file import schedule_file
from sparrow.config import to_yaml
from sparrow.protocols import AdaptiveBudget
from sparrow.recipes.grpo_config import GRPOConfig
from sparrow.recipes.grpo_resume import SETTINGS, write_settings
from sparrow.tracking.tracker import SafeTrackers


def start_trackers(trackers: SafeTrackers, cfg: GRPOConfig, budget: Any, run_id: str | None) -> None:
    """Starts them with the settings and the version of the code, and writes the settings beside the run's metrics."""
    output_dir = Path(cfg.output_dir)
    trackers.start(output_dir, yaml.safe_load(to_yaml(cfg)) | {"code": code_version()}, run_id)
    output_dir.mkdir(parents=True, exist_ok=True)
    write_settings(cfg, output_dir)
    trackers.log_files(f"settings-{trackers.run_id}", "settings", [output_dir / SETTINGS])
    if files := _schedule_files(budget):
        trackers.log_files(f"schedule-{files[0].stem}", "schedule", files)


def code_version() -> dict[str, str | None]:
    """Of Sparrow, None where it is not installed; of the commit where it runs from a checkout, and of PyTorch."""
    version = next((found.version for found in distributions(name="sparrow-rl")), None)
    commit = _commit(Path(__file__).resolve().parents[1])
    return {"sparrow": version, "commit": commit, "torch": str(torch.__version__)}


def _commit(folder: Path) -> str | None:
    """`-dirty` marks one with changes; None without git or a checkout."""
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _schedule_files(budget: Any) -> list[Path]:
    """The schedule's file, and the surface that `sparrow_calibrate` wrote beside it."""
    schedule = budget.start if isinstance(budget, AdaptiveBudget) else budget
    if not isinstance(schedule, StepSchedule) or schedule.provenance is None:
        return []
    file = schedule_file(schedule.where)
    return [path for path in (file, *sorted(file.parent.glob("surface*.csv"))) if path.is_file()]
