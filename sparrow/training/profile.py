"""A trace of one step, for chrome://tracing or Perfetto."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


class Trace:
    """What the CPU and, where there is one, the GPU do from now until it is written."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
        self._profile = profile(activities=activities)
        self._profile.start()

    def write(self, path: Path) -> None:
        """Ends it; gzip-compressed where `path` ends with .gz."""
        self._profile.stop()
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"part.{path.name}")  # torch goes by the suffix
        self._profile.export_chrome_trace(str(part))
        os.replace(part, path)
