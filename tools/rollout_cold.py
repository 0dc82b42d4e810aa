"""Mode `cold` of the rollout benchmark: seconds from the start of the process to the first tokens.

Run it twice: the first run compiles kernels and measures launch options, the second finds both on disk.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from rollout_meter import Clock
from rollout_queue import EngineSizes, QueueRun, RequestQueue
from rollout_shapes import random_model, tune

from sparrow.protocols import KVCache

STAGES = ("imports", "weights", "tuning", "graphs", "first_tokens")


@dataclass(frozen=True)
class ColdResult:
    """Seconds of each stage.

    Attributes:
        imports: Python, torch and the engine.
        weights: drawn on the device; loading a checkpoint takes what its disk takes.
        tuning: launch options, measured or found.
        graphs: pool, kernels and CUDA graphs.
        first_tokens: prefill of the first rows and the first window of steps.
    """

    model: str
    cache: str
    max_rows: int
    imports: float
    weights: float
    tuning: float
    graphs: float
    first_tokens: float

    @property
    def total(self) -> float:
        return sum(getattr(self, stage) for stage in STAGES)


def seconds_since_start() -> float:
    """Age of this process (Linux)."""
    # The name of the program, in brackets, may hold blanks; the start is the 20th field after it, in clock ticks.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")


class Stopwatch:
    """Seconds since it was last read, the device's work included."""

    def __init__(self, device: torch.device) -> None:
        self.clock = Clock(device)
        self.last = time.perf_counter()  # Not the clock's: to wait for the device is to make its context, a first lap.

    def lap(self) -> float:
        """Reads and restarts."""
        before, self.last = self.last, self.clock.now()
        return self.last - before


def measure_cold(
    name: str, spec: str, cache: KVCache, queue: RequestQueue, sizes: EngineSizes, watch: Stopwatch, imports: float
) -> ColdResult:
    """Everything from the weights to the first look at tokens; `imports` is what went before the watch was started."""
    device = watch.clock.device
    model = random_model(name, device)
    weights = watch.lap()
    tune(model, sizes.max_rows)
    tuning = watch.lap()
    run = QueueRun(model, cache, queue, sizes)
    graphs = watch.lap()
    with torch.no_grad():
        run.generation.window()
    result = ColdResult(name, spec, sizes.max_rows, imports, weights, tuning, graphs, watch.lap())
    run.close()
    return result


def show_cold(result: ColdResult) -> str:
    """One line."""
    stages = ", ".join(f"{stage.replace('_', ' ')} {getattr(result, stage):.1f} s" for stage in STAGES)
    return f"{result.model} {result.cache}, up to {result.max_rows} rows: {stages}; in all {result.total:.1f} s"
