"""A trace of one step, for chrome://tracing or Perfetto."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


@contextmanager
def traced(path: Path) -> Iterator[None]:
    """Writes what the CPU and, where there is one, the GPU did inside; gzip-compressed where `path` ends with .gz."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    with profile(activities=activities) as profiler:
        yield
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"part.{path.name}")  # torch goes by the suffix
    profiler.export_chrome_trace(str(part))
    os.replace(part, path)
