"""The tables of docs/cost.md that no config prints: the paper's own figures, and what landmarks cost by selector.

  python tools/cost_tables.py

Needs no GPU. Schedules are those for .86; rows, lengths and latencies those of docs/performance.md and docs/cost.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from rollout_shapes import model_config

from sparrow.components.budget import StepSchedule
from sparrow.components.kv_cache import DenseKVCache, SparseKVCache
from sparrow.components.selector import CentroidSelector, QuestSelector, SegmentSoftmaxSelector
from sparrow.cost import Cost, Work, printed_speedup, rollout_cost, step_cost
from sparrow.memory_sizes import parameter_counts
from sparrow.rates import Rates
from sparrow.recipes.cost_config import Workload, cache_shape

RATES = Rates(flop_per_s=989.0e12, bytes_per_s=4.45e12, layer_us=45, selection_us=23)
DATA_SHEET = 989e12 * 2 / 4.8e12  # I, FLOPs per element
ROWS = {"1.7b": 66, "4b": 57, "8b": 52, "14b": 44}  # at once, in the mean of the measured makespans
PROMPT, LIMIT, SHORT = 300, 37_000, 16_000


def main(argv: list[str] | None = None) -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(argv)
    print("\n".join([*paper_table(), "", *landmark_table()]))
    return 0


def paper_table() -> list[str]:
    """How many times faster rollouts are than dense ones, by the paper's formulas and by the corrected ones."""
    columns = [_speedups(name) for name in ROWS]
    heading = _line("dense over sparse", list(ROWS))
    return [heading, *(_line(row, [f"{column[row]:.2f}" for column in columns]) for row in columns[0])]


def _speedups(name: str) -> dict[str, float]:
    long, queue = _limit(name), _queue(name)
    return {
        f"printed formulas, response {LIMIT}": _printed(name, LIMIT),
        f"printed formulas, response {SHORT}": _printed(name, SHORT),
        f"corrected eFLOPs, response {LIMIT}": _ratio(name, long, lambda cost: cost.eflop(DATA_SHEET)),
        "corrected eFLOPs, lengths of the queue": _ratio(name, queue, lambda cost: cost.eflop(DATA_SHEET)),
        "the same in seconds, latencies of 4B": _ratio(name, queue, lambda cost: cost.seconds(RATES)),
    }


def _printed(name: str, response: int) -> float:
    model, pages = model_config(name), StepSchedule(f"qwen3-{name}-0.86").pages
    lengths_T = PROMPT + torch.arange(1, response + 1)
    budget = float((16 * pages(lengths_T)).double().mean())
    return printed_speedup(model, parameter_counts(model).total, PROMPT, response, budget, DATA_SHEET)


def _ratio(name: str, work: Work, measure: Callable[[Cost], float]) -> float:
    model, sparse = model_config(name), SparseKVCache(StepSchedule(f"qwen3-{name}-0.86"), CentroidSelector())
    dense, ours = (rollout_cost(model, cache_shape(cache), work) for cache in (DenseKVCache(), sparse))
    return measure(dense) / measure(ours)


def _limit(name: str) -> Work:
    rows = ROWS[name]
    return Workload(requests=rows, rows=rows, prompt=PROMPT, median=LIMIT, sigma=0.0, longest=LIMIT).work(0)


def _queue(name: str) -> Work:
    return Workload(rows=ROWS[name], prompt=PROMPT, median=9000, shortest=500, longest=32000).work(0)


def landmark_table() -> list[str]:
    """Milliseconds of a step of 20 rows of 4B, and the share of its bytes that are landmarks."""
    model, selectors = model_config("4b"), (CentroidSelector(), QuestSelector(), SegmentSoftmaxSelector(4))
    lines = [_line("context", ["dense ms", *(type(selector).__name__ for selector in selectors)])]
    for context in (4096, 8192, 16384, 32768):
        dense = step_cost(model, cache_shape(DenseKVCache()), context, 20)
        cells = [f"{dense.seconds(RATES) * 1e3:.2f}"]
        for selector in selectors:
            cache = SparseKVCache(StepSchedule("qwen3-4b-0.86"), selector)
            cost = step_cost(model, cache_shape(cache), context, 20)
            cells.append(f"{cost.seconds(RATES) * 1e3:.2f}, {cost.selection_share:.1%}")
        lines.append(_line(str(context), cells))
    return lines


def _line(head: str, cells: list[str]) -> str:
    return f"{head:40}" + "".join(f"{cell:>24}" for cell in cells)


if __name__ == "__main__":
    sys.exit(main())
