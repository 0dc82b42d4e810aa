"""Launch options of the projections: from the table that ships, from a cache on disk, or measured once and cached.

Axes: M rows, N output and K input features.
"""

from __future__ import annotations

import json
import math
from dataclasses import astuple
from pathlib import Path

import torch
from torch import Tensor
from triton.compiler.compiler import max_shared_mem
from triton.runtime.errors import OutOfResources

from sparrow.kernels.add_norm import add_norm
from sparrow.kernels.linear import MOST_ROWS, LinearOptions, linear, swiglu
from sparrow.kernels.options_file import Known, add_known, cache_file, read_known
from sparrow.kernels.timing import milliseconds

SHIPPED = Path(__file__).with_name("known_options.json")
SMALLEST_TILE_M = 16
TIMED_BYTES = 5e8  # Weights that a timing walks over, so that none is found in L2.
REPLAYS = 5
WIDEST_NORM = 8192  # A head's output is no hidden state.

RESERVED_MEMORY = 27 * 2**10  # of a block's shared memory, for what is not a tile
MOST_STAGES = 6
FEWEST_ROWS, MOST_TILE_N = 24, 128  # fewer rows, and the input's traffic is that of the weights
FREE_ROWS = 64  # per block where a matrix is so wide that its blocks even out by themselves


def candidates(
    N: int, K: int, tile_m: int, processors: int, shared_memory: int, itemsize: int, gated: bool
) -> list[LinearOptions]:
    """Options worth measuring: one or two blocks per multiprocessor, or many small ones, as deep as memory holds.

    Args:
        N: rows of the weight matrix, half of them where gated.
        shared_memory: bytes that a block may have.
    """
    found = []
    for shares in (1,) if gated else (1, 2, 4):
        for blocks in (processors, 2 * processors, None):
            rows = FREE_ROWS if blocks is None else -(-N // max(1, blocks // shares))
            tile_n = max(16, 1 << (rows - 1).bit_length())
            uneven = blocks is None and (shares > 1 or 2 * processors * FREE_ROWS > N)
            if uneven or rows < FEWEST_ROWS or rows > MOST_TILE_N:
                continue
            for tile_k in (64, 128):
                stage = ((2 if gated else 1) * tile_n + tile_m) * tile_k * itemsize
                stages = min(MOST_STAGES, shared_memory // (1 if blocks == processors else 2) // stage)
                for fetch in (0, 512):
                    options = LinearOptions(rows, tile_k, shares, 8 if tile_n == MOST_TILE_N else 4, stages, fetch)
                    if stages >= 2 and options.fits(K):
                        found.append(options)
    return found


class LinearOptionsTable:
    """Options by device, dtype, rows (rounded up to a tile) and matrix; cuBLAS (None) where nothing is known."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self.prefix = f"{torch.cuda.get_device_name(device)} {str(dtype).removeprefix('torch.')}"
        self.known: Known = json.loads(SHIPPED.read_text()) | read_known(cache_file())
        self._chosen: dict[tuple[int, torch.Size, bool], LinearOptions | None] = {}

    def get(self, rows: int, weight: Tensor, gated: bool) -> LinearOptions | None:
        """Options for `rows` rows through `weight`; `gated` for SwiGLU's two projections in one matrix."""
        key = (_tile(rows), weight.shape, gated)
        if key not in self._chosen:
            values = self.known.get(self._key(*key))
            self._chosen[key] = LinearOptions(*values) if values is not None and rows <= MOST_ROWS else None
        return self._chosen[key]

    def tune(self, weights: list[Tensor], rows: int, gated: bool) -> None:
        """Measures all candidates over matrices of one shape, unless the answer is known, and keeps it on disk."""
        key = self._key(_tile(rows), weights[0].shape, gated)
        if key in self.known or rows > MOST_ROWS:
            return
        weights = weights[: max(2, int(TIMED_BYTES // weights[0].nbytes) + 1)]
        N, K = weights[0].shape
        device, itemsize = weights[0].get_device(), weights[0].itemsize
        memory = max_shared_mem(device) - RESERVED_MEMORY
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        tried = candidates(N // 2 if gated else N, K, _tile(rows), processors, memory, itemsize, gated)
        timed = {options: _time_if_it_fits(weights, rows, options, gated) for options in (None, *tried)}
        best = min(timed, key=timed.__getitem__)
        self.known[key] = None if best is None else list(astuple(best))
        self._chosen.clear()
        add_known(cache_file(), {key: self.known[key]})

    def _key(self, tile_m: int, shape: torch.Size, gated: bool) -> str:
        return f"{self.prefix} {tile_m}x{shape[0]}x{shape[1]}{' gated' if gated else ''}"


def row_tiles(num_rows: int) -> list[int]:
    """Heights of the kernels' row tiles for batches of 1 to `num_rows`: what options are kept for."""
    tiles = [SMALLEST_TILE_M]
    while tiles[-1] < min(num_rows, MOST_ROWS):
        tiles.append(2 * tiles[-1])
    return tiles


def _tile(rows: int) -> int:
    return max(SMALLEST_TILE_M, 1 << (rows - 1).bit_length())


def _time_if_it_fits(weights: list[Tensor], rows: int, options: LinearOptions | None, gated: bool) -> float:
    """As `_time`; infinite where the kernel wants more shared memory or registers than the estimate."""
    try:
        return _time(weights, rows, options, gated)
    except OutOfResources:
        return math.inf


def _time(weights: list[Tensor], rows: int, options: LinearOptions | None, gated: bool) -> float:
    """Milliseconds for one pass over the weights.

    Between the kernels that stand around a projection in a step: what it prefetches while one runs, and what its shares
    cost the other, count.
    """
    N, K = weights[0].shape
    before, after = (weights[0].new_empty(rows, width).normal_() for width in (K, N))
    gain = weights[0].new_ones(max(N, K))
    nothing = weights[0].new_zeros(1, rows, K)

    def work() -> None:
        for weight in weights:
            x = add_norm(before, nothing, gain, 1e-6)  # shares of zeros: real inputs, however often it is repeated
            if gated:
                swiglu(x, weight, options)
            else:
                y = linear(x, weight, options)
                if N <= WIDEST_NORM:
                    add_norm(after, y, gain, 1e-6)

    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    graph.replay()
    return min(milliseconds(graph.replay, REPLAYS))
