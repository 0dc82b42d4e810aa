"""Predicted against measured: JSON files of tools/bench_rollout.py beside what the cost model says of the same case.

Each row is predicted at the read bandwidth that its own process measured. A makespan is predicted with the steps and
the mean number of rows that it took: what is left is the distance of the kernels and the host from the roofline.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sparrow.cost import CacheShape, Cost, Work, decode_cost, prefill_flop, step_cost
from sparrow.errors import UserError
from sparrow.models.decoder_config import DecoderConfig
from sparrow.rates import Rates
from sparrow.recipes.cost_config import Measured

STEP_KEYS = ("cache", "backend", "batch", "context", "ms", "roof_gb_s")
NUMBERS = ("batch", "context", "ms", "roof_gb_s", "requests", "makespan_s", "steps", "mean_rows")
MAKESPAN_KEYS = ("cache", "backend", "requests", "lengths", "makespan_s", "steps", "mean_rows", "roof_gb_s")


@dataclass(frozen=True)
class Comparison:
    """One measured case; the speed-ups are over the dense cache of the same case, where it was measured.

    Attributes:
        case: what was measured: mode, backend, sizes.
        rows, context: of a decode step; 0 for a makespan.
    """

    case: str
    cache: str
    predicted_s: float
    measured_s: float
    rows: int = 0
    context: int = 0
    predicted_speedup: float | None = None
    measured_speedup: float | None = None


def compare(
    measured: Measured, model: DecoderConfig, caches: Mapping[str, CacheShape], rates: Rates, work: Work
) -> list[Comparison]:
    """All rows of the file that are of this model and of a known cache.

    Args:
        work: its lengths, scaled to the measured mean, are those of a makespan.

    Raises:
        UserError: not such a file, or none of its rows fits.
    """
    rows = _read(Path(measured.path))
    found = [row for row in rows if row["model"] == measured.model and row["cache"] in caches]
    if not found:
        there = ", ".join(sorted({f"{row['model']} {row['cache']}" for row in rows}))
        raise UserError(f"{measured.path}: no row of model {measured.model} and a cache of `caches`; it has {there}")
    return _with_speedups([_compare_row(row, model, caches[row["cache"]], rates, work) for row in found])


def latencies(comparisons: Sequence[Comparison], costs: Mapping[str, Cost]) -> tuple[float, float] | None:
    """What measured steps take above their prediction: microseconds a layer, and a sparse layer's on top of it.

    Medians: first over the dense steps, then over the sparse ones, less the same for their layers.

    Args:
        costs: any cost of each cache, for its numbers of layers.
    """
    excess = [(c.measured_s - c.predicted_s, costs[c.cache]) for c in comparisons if c.context]
    dense = [seconds / cost.layers for seconds, cost in excess if not cost.sparse_layers]
    if not dense or len(dense) == len(excess):
        return None
    layer = statistics.median(dense)
    sparse = [(s - cost.layers * layer) / cost.sparse_layers for s, cost in excess if cost.sparse_layers]
    return layer * 1e6, statistics.median(sparse) * 1e6


def _read(path: Path) -> list[dict[str, Any]]:
    try:
        rows = list(json.loads(path.read_text(encoding="utf-8"))["results"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a JSON file of tools/bench_rollout.py --out: {error!r}") from None
    for number, row in enumerate(rows):
        _check_row(row, f"{path}: results[{number}]")
    return rows


def _check_row(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise UserError(f"{where} is a {type(row).__name__}, not a result")
    wanted = MAKESPAN_KEYS if "makespan_s" in row else STEP_KEYS
    if missing := [key for key in ("model", *wanted) if key not in row]:
        raise UserError(f"{where} lacks {', '.join(missing)}; it is of neither mode step nor makespan")
    for key in NUMBERS:
        if key in row and not (type(row[key]) in (int, float) and row[key] > 0):
            raise UserError(f"{where}.{key}: {row[key]!r} must be a number above 0")


def _compare_row(row: dict[str, Any], model: DecoderConfig, cache: CacheShape, rates: Rates, work: Work) -> Comparison:
    here = replace(rates, bytes_per_s=row["roof_gb_s"] * 1e9)
    if "makespan_s" in row:
        case = f"makespan, {row['backend']}, {row['requests']} requests of {row['lengths']['mean']:.0f}"
        return Comparison(case, row["cache"], _queue_cost(row, model, cache, work).seconds(here), row["makespan_s"])
    predicted = step_cost(model, cache, row["context"], row["batch"]).seconds(here)
    case = f"step, {row['backend']}, {row['batch']} rows at {row['context']}"
    return Comparison(case, row["cache"], predicted, row["ms"] / 1e3, row["batch"], row["context"])


def _queue_cost(row: dict[str, Any], model: DecoderConfig, cache: CacheShape, work: Work) -> Cost:
    """The workload's lengths stretched to the measured mean, over the steps that were counted."""
    stretch = row["lengths"]["mean"] / float(work.responses_S.double().mean())
    alike = replace(work, responses_S=(work.responses_S * stretch).round().long().clamp(min=1))
    requests = row["requests"] / len(work.responses_S)
    rows = max(round(row["mean_rows"]), 1)
    steps_R = torch.zeros(rows + 1, dtype=torch.float64)
    steps_R[rows] = row["steps"]
    cost = decode_cost(model, cache, alike.tokens_L() * requests, steps_R)
    return replace(cost, prefill_flop=prefill_flop(model, alike) * requests)


def _with_speedups(comparisons: Sequence[Comparison]) -> list[Comparison]:
    dense = {comparison.case: comparison for comparison in comparisons if comparison.cache == "dense"}
    return [
        comparison
        if comparison.cache == "dense" or comparison.case not in dense
        else replace(
            comparison,
            predicted_speedup=dense[comparison.case].predicted_s / comparison.predicted_s,
            measured_speedup=dense[comparison.case].measured_s / comparison.measured_s,
        )
        for comparison in comparisons
    ]
