"""Time on the device."""

from __future__ import annotations

from collections.abc import Callable

import torch


def milliseconds(work: Callable[[], object], times: int) -> list[float]:
    """Of each of `times` calls, between two CUDA events."""
    found = []
    for _ in range(times):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end))
    return found
