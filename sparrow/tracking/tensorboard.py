"""TensorBoard event files in the run's directory; needs the package `tensorboard`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from sparrow.errors import UserError
from sparrow.tracking.histogram import take_histograms
from sparrow.tracking.samples import markdown


class TensorBoardTracker:
    """Scalars, histograms, the config and the samples as text, under `tensorboard/` of the run.

    A resumed run goes on in a file of its own; what TensorBoard has from the steps that are repeated, it drops.

    Raises:
        UserError: at `start`, where `tensorboard` is not installed.
    """

    def start(self, run_dir: Path, config: dict[str, Any], run_id: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UserError("TensorBoardTracker: pip install tensorboard") from error
        self._writer_class: Any = SummaryWriter
        self._folder = run_dir / "tensorboard"
        self._writer: Any = None
        self._config = f"    {yaml.safe_dump(config, sort_keys=False)}".replace("\n", "\n    ")  # markdown's code block

    def log_dict(self, metrics: Mapping[str, float], step: int) -> None:
        scalars, histograms = take_histograms(metrics)
        writer = self._open(step)
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
        for name, histogram in histograms.items():
            writer.add_histogram_raw(name, global_step=step, bucket_limits=histogram.edges[1:], **histogram.moments())

    def log_samples(self, rows: list[dict[str, Any]], step: int) -> None:
        for index, row in enumerate(rows):
            self._open(step).add_text(f"samples/{index}", markdown(row), step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _open(self, step: int) -> Any:
        if self._writer is None:
            self._writer = self._writer_class(str(self._folder), purge_step=step)
            self._writer.add_text("config", self._config, step)
        self._writer.flush()
        return self._writer
