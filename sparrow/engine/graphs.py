"""Decode steps as CUDA graphs: one per batch bucket and context bucket, captured largest first into one memory pool.

A step is some hundreds of short kernels; replayed as one graph, none of them waits for Python. A batch is padded to its
bucket with the null row. Sequence lengths, budgets, block tables and random numbers are read from the device at replay.

Axes: R rows, B rows of a bucket, N blocks per row.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import cache

import torch

from sparrow.engine.decode import Drawing, RolloutModel, decode_step
from sparrow.engine.rows import Rows
from sparrow.protocols import KVCache

SHORTEST_CONTEXT = 8192  # tokens of the smallest context bucket; each further one doubles


def batch_buckets(num_rows: int) -> list[int]:
    """1, 2, 4, 8, then in steps of 4, 8, 16 and 32 rows, up to one that holds `num_rows`."""
    buckets = [1, 2, 4, 8]
    while buckets[-1] < num_rows:
        last = buckets[-1]
        buckets.append(last + (4 if last < 24 else 8 if last < 64 else 16 if last < 128 else 32))
    return [b for i, b in enumerate(buckets) if i == 0 or buckets[i - 1] < num_rows]


def context_buckets(max_blocks: int, block_size: int) -> list[int]:
    """Widths of the block table, in blocks: from `SHORTEST_CONTEXT` doubling to 3/4 of `max_blocks`, and that."""
    buckets = []
    width = max(1, SHORTEST_CONTEXT // block_size)
    while 4 * width <= 3 * max_blocks:
        buckets.append(width)
        width *= 2
    return [*buckets, max_blocks]


def graph_buckets(num_rows: int, max_blocks: int, block_size: int) -> list[tuple[int, int]]:
    """All pairs of rows and blocks per row that an engine of this size needs graphs for."""
    return [(b, n) for b in batch_buckets(num_rows) for n in context_buckets(max_blocks, block_size)]


@cache
def _warm_up_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures of the process: cuBLAS keeps a workspace for each stream that it ever ran on."""
    return torch.cuda.Stream(device)


class GraphStepper:
    """Replays `decode_step`; see `sparrow.engine.decode.Stepper`. It belongs to one pool and one set of rows.

    Args:
        buckets: rows and blocks per row of the graphs to capture.

    Where memory ends during capture, the smaller buckets still to come are left out, with a warning: their batches are
    padded to a larger one.
    """

    def __init__(
        self, model: RolloutModel, cache: KVCache, rows: Rows, drawing: Drawing, buckets: Sequence[tuple[int, int]]
    ) -> None:
        self.model, self.cache, self.rows, self.drawing = model, cache, rows, drawing
        wanted = sorted(buckets, reverse=True)
        self.rows_B = torch.full((wanted[0][0],), rows.null_row, device=rows.device)
        self.memory_pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        for done, bucket in enumerate(wanted):
            try:
                self.graphs[bucket] = self._capture(*bucket)
            except RuntimeError as error:  # PyTorch's own, or the driver's, where a graph or a module is made
                if not self.graphs or "out of memory" not in str(error):
                    raise
                warnings.warn(
                    f"out of memory after {done} of {len(wanted)} CUDA graphs: batches of the buckets left out are "
                    "padded to larger ones; a smaller engine.kv_tokens or engine.max_rows leaves room for them",
                    stacklevel=2,
                )
                break
        torch.cuda.empty_cache()  # What a failed capture held is free only now.

    def run(self, rows: list[int], longest: int, steps: int) -> None:
        """See `Stepper`."""
        blocks = -(-longest // self.cache.block_size)
        size, width = min(bucket for bucket in self.graphs if bucket[0] >= len(rows) and bucket[1] >= blocks)
        padding = [self.rows.null_row] * (size - len(rows))
        self.rows_B[:size] = torch.tensor(rows + padding, device=self.rows.device)
        graph = self.graphs[size, width]
        for _ in range(steps):
            graph.replay()

    def _capture(self, size: int, width: int) -> torch.cuda.CUDAGraph:
        """A graph over the first `size` rows of the buffer; all are the null row now, so that nothing is changed."""
        graph = torch.cuda.CUDAGraph()
        arguments = (self.model, self.cache, self.rows, self.rows_B[:size], width, self.drawing)
        stream = _warm_up_stream(self.rows.device)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            decode_step(*arguments)  # compiles what the capture must find compiled
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, pool=self.memory_pool):
            decode_step(*arguments)
        return graph
