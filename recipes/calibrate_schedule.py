"""The schedule file that a calibration ends in, with everything that its budgets depend on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

import yaml

from sparrow.components.schedule_file import ScheduleFile
from sparrow.protocols import RunSettings
from sparrow.recipes.calibrate_config import CalibrateConfig, Mode
from sparrow.recipes.calibrate_surface import Cell
from sparrow.whole_files import write_text


def schedule_of(
    chosen: Sequence[Cell], mode: Mode, cfg: CalibrateConfig, bin_width: int, settings: RunSettings
) -> ScheduleFile:
    """The chosen cells, one for each measured bin, as a schedule from length 0 on for runs of these settings."""
    unmeasured = chosen[0].bin_start // bin_width
    return ScheduleFile(
        **vars(settings) | {"model": Path(settings.model).absolute().name},
        bin_width=bin_width,
        pages=[chosen[0].budget] * unmeasured + [cell.budget for cell in chosen],
        source="calibrated",
        mode=mode,
        prompts=cfg.prompts,
        tokens_per_bin=[0] * unmeasured + [cell.tokens for cell in chosen],
        confidence=cfg.confidence,
        date=datetime.now(UTC).date().isoformat(),
    )


def write_schedule(file: Path, schedule: ScheduleFile) -> None:
    """As `sparrow.components.schedule_file.read_schedule` reads it."""
    node = {key: value for key, value in asdict(schedule).items() if value is not None}
    comment = f"# Total pages per {schedule.bin_width} tokens of cached length, from sparrow_calibrate\n"
    text = comment + yaml.safe_dump(node, sort_keys=False, default_flow_style=None, width=120)
    write_text(file, text)
