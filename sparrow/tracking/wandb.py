"""Weights & Biases, offline unless asked otherwise."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sparrow.errors import UserError
from sparrow.tracking.histogram import take_histograms
from sparrow.tracking.samples import flat_row, shorten

_log = logging.getLogger(__name__)


class WandbTracker:
    """Scalars and histograms over `global_step`, one table `samples` that grows by rows, and the run's files.

    Nothing leaves the machine with mode "offline"; `wandb sync` uploads the run's folder later. The environment
    variable WANDB_MODE wins over `mode`. Where a server cannot be reached at the start, or there is no key for it, the
    run is logged offline. A resumed run keeps its id, so that its parts merge into one curve.

    Args:
        project: W&B project.
        name: display name of the run; W&B invents one where it is None.
        mode: online, offline or disabled.
        max_characters: longer texts in the sample table lose their middle.
    """

    def __init__(
        self,
        project: str,
        name: str | None = None,
        mode: Literal["online", "offline", "disabled"] = "offline",
        max_characters: int = 4000,
    ) -> None:
        if max_characters < 1:
            raise UserError(f"WandbTracker: max_characters must be at least 1, got {max_characters}")
        self._project = project
        self._name = name
        self._mode = mode
        self._max_characters = max_characters
        self._table: Any = None

    def start(self, run_dir: Path, config: dict[str, Any], run_id: str) -> None:
        # A second of import that only runs with W&B should pay for.
        import wandb

        run_dir.mkdir(parents=True, exist_ok=True)
        mode: Any = os.environ.get("WANDB_MODE") or self._mode
        settings: dict[str, Any] = {"project": self._project, "name": self._name, "dir": run_dir, "config": config}
        try:
            self._run = wandb.init(**settings, id=run_id, resume="allow", mode=mode)
        except wandb.Error as error:
            if mode != "online":
                raise
            _log.warning("W&B: %s; this part of the run is logged offline, `wandb sync` uploads it", error)
            self._run = wandb.init(**settings, id=run_id, resume="allow", mode="offline")
        # W&B's own step only grows: a resumed run that repeats steps would lose them.
        self._run.define_metric("*", step_metric="global_step")
        self._wandb = wandb

    def log_dict(self, metrics: Mapping[str, float], step: int) -> None:
        scalars, histograms = take_histograms(metrics)
        drawn = {
            name: self._wandb.Histogram(np_histogram=(np.array(histogram.counts), np.array(histogram.edges)))
            for name, histogram in histograms.items()
        }
        self._run.log({**scalars, **drawn, "global_step": step})

    def log_samples(self, rows: list[dict[str, Any]], step: int) -> None:
        """The columns are those of the first row ever logged."""
        if not rows:
            return
        rows = [flat_row(row) for row in rows]
        if self._table is None:
            self._table = self._wandb.Table(columns=["step", *rows[0]], log_mode="INCREMENTAL")
        for row in rows:
            self._table.add_data(step, *(self._cell(row.get(name)) for name in self._table.columns[1:]))
        self._run.log({"samples": self._table, "global_step": step})

    def log_files(self, name: str, kind: str, paths: Sequence[Path]) -> None:
        """An artifact; W&B makes a new version of it only where a file changed."""
        artifact = self._wandb.Artifact(name, type=kind)
        for path in paths:
            artifact.add_file(str(path), name=path.name)
        self._run.log_artifact(artifact)

    def close(self) -> None:
        self._run.finish()

    def _cell(self, value: Any) -> Any:
        return shorten(value, self._max_characters) if isinstance(value, str) else value
