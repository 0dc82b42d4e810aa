"""The roof of a decode step: how fast this machine reads its own memory, measured."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from sparrow.kernels.timing import milliseconds

TIMINGS = 8  # the first one warms up
CPU_GIB = 0.25


def read_bandwidth(device: torch.device, gib: float = 4) -> float:
    """GB/s of reading `gib` GiB of random bf16 once while writing next to nothing, best of several.

    On the CPU it is a sum over a quarter of a GiB of fp32: a figure to try the tools with.
    """
    if device.type == "cuda":
        from roof_kernel import reader  # Triton is not installed where there is no GPU

        x = torch.empty(int(gib * 2**29), dtype=torch.bfloat16, device=device).normal_()
        return x.nbytes / min(milliseconds(reader(x), TIMINGS)[1:]) / 1e6
    x = torch.rand(int(CPU_GIB * 2**28))
    return x.nbytes / min(_cpu_seconds(x.sum)) / 1e9


def _cpu_seconds(read: Callable[[], object]) -> list[float]:
    seconds = []
    for _ in range(TIMINGS):
        started = time.perf_counter()
        read()
        seconds.append(time.perf_counter() - started)
    return seconds[1:]
