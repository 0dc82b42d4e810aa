"""The two rates that a cost model needs of a machine, FLOPs and bytes per second: given, or measured."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparrow.errors import UserError

TIMINGS = 8  # the first one warms up
COPY_BYTES = {"cuda": 4 * 2**30, "cpu": 2**27}
MATMUL_SIZE = {"cuda": 8192, "cpu": 1024}


@dataclass(frozen=True)
class Rates:
    """What a machine does in a second.

    Attributes:
        flop_per_s: of a large matrix product in the rollout's dtype.
        bytes_per_s: of the device's memory.
        element_bytes: of a weight and of a KV entry; 2 is bf16.
        layer_us, selection_us: what a layer of a decode step takes besides, and a sparse layer's selection on top of
            it: kernels start, and short ones never reach full speed. `sparrow_cost` says what measured steps imply.
    """

    flop_per_s: float
    bytes_per_s: float
    element_bytes: int = 2
    layer_us: float = 0.0
    selection_us: float = 0.0

    def __post_init__(self) -> None:
        for key in ("flop_per_s", "bytes_per_s", "element_bytes"):
            if not 0 < getattr(self, key) < math.inf:
                raise UserError(f"{key}: {getattr(self, key)} must be above 0 and finite")
        for key in ("layer_us", "selection_us"):
            if not 0 <= getattr(self, key) < math.inf:
                raise UserError(f"{key}: {getattr(self, key)} must be at least 0 and finite")

    @property
    def intensity(self) -> float:
        """I of the paper: FLOPs in the time that one element takes; 412 by the data sheet of an H200 in bf16."""
        return self.flop_per_s * self.element_bytes / self.bytes_per_s

    def seconds(self, flop: Any, elements: Any) -> Any:
        """The slower of computing and moving, without latencies; numbers or tensors of one shape."""
        computing, moving = flop / self.flop_per_s, elements * self.element_bytes / self.bytes_per_s
        return torch.maximum(*map(torch.as_tensor, (computing, moving)))


def measure_rates(device: torch.device) -> Rates:
    """A matrix product and a copy, read and write counted, best of several; bf16 on CUDA, fp32 on the CPU.

    A kernel that only reads goes faster than a copy (`tools/roof.py`: 4,330 to 4,560 GB/s on an H200); to predict
    such kernels, measure that rate and give it.
    """
    dtype, flop_per_s = _dtype(device), measure_flop_per_s(device)
    source = torch.randn(COPY_BYTES[device.type] // dtype.itemsize, dtype=dtype, device=device)
    target = torch.empty_like(source)
    bytes_per_s = 2 * source.nbytes / _best_seconds(lambda: target.copy_(source), device)
    return Rates(flop_per_s, bytes_per_s, dtype.itemsize)


def measure_flop_per_s(device: torch.device) -> float:
    """Of a square matrix product, best of several; bf16 on CUDA, fp32 on the CPU."""
    size, dtype = MATMUL_SIZE[device.type], _dtype(device)
    left, right = (torch.randn(size, size, dtype=dtype, device=device) for _ in range(2))
    product = torch.empty_like(left)
    return 2 * size**3 / _best_seconds(lambda: torch.mm(left, right, out=product), device)


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _best_seconds(work: Callable[[], Tensor], device: torch.device) -> float:
    seconds = []
    for _ in range(TIMINGS):
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
