"""Figures of an evaluation: results.json, which depends on the samples alone, and the printed tables."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparrow.estimators import CONFIDENCE, RESAMPLES, Estimate, over_problems
from sparrow.recipes.eval_config import Mode
from sparrow.recipes.eval_store import SampleStore, figures_of
from sparrow.recipes.evaluate import Judged, of_samples, per_problem
from sparrow.whole_files import write_text

Result = dict[str, Any]  # of one benchmark and mode
FEW_PROBLEMS = 100


def result_of(store: SampleStore, num_samples: int, with_answers: bool) -> tuple[Result, dict[str, list[float]]]:
    """The figures of one benchmark and mode, and those of each problem."""
    rows = list(store.samples())
    judged = [_judged(row) for row in rows]
    problems = per_problem(judged, num_samples, with_answers)
    read, dense = (sum(row[key] for row in rows) for key in ("kv_read", "kv_dense"))
    counts: Counter[str] = Counter()
    for window in store.windows:
        counts.update(window["counts"])
    result = {
        **{name: asdict(over_problems(values)) for name, values in problems.items()},
        **of_samples(judged),
        "tokens": sum(one.tokens for one in judged),
        "kv_read_ratio": read / dense if dense else None,
        "outcomes": dict(sorted(counts.items())),
    }
    return result, problems


def _judged(row: Mapping[str, Any]) -> Judged:
    return Judged(row["number"], row["sample"], row["reward"], row["answer"], row["tokens"], row["terminated"])


def differences(dense: Mapping[str, list[float]], sparse: Mapping[str, list[float]]) -> dict[str, dict[str, Any]]:
    """Sparse minus dense, problem by problem."""
    return {
        name: asdict(over_problems([s - d for d, s in zip(dense[name], sparse[name], strict=True)])) for name in dense
    }


def joined(output_dir: Path, settings: Mapping[tuple[str, Mode], dict[str, Any]]) -> dict[str, Result]:
    """The figures of all that is complete in the folder and has these settings, whichever command measured it.

    Args:
        output_dir: of the evaluation.
        settings: by benchmark and mode, dense first; not those of the data, where it was not read.
    """
    results: dict[str, Result] = {}
    of_dense: dict[str, Any] = {}
    for (name, mode), wanted in settings.items():
        figures = figures_of(output_dir / name / mode, wanted)
        if figures is None or figures["data"] != of_dense.get(name, figures)["data"]:
            continue
        one = results.setdefault(name, figures["about"])
        one[mode] = figures["result"]
        if mode == "dense":
            of_dense[name] = figures
        elif name in of_dense:
            one["sparse_minus_dense"] = differences(of_dense[name]["problems"], figures["problems"])
    return results


def write_results(file: Path, run: Mapping[str, Any], benchmarks: Mapping[str, Any]) -> None:
    """`file` is the old one or the new one at every moment."""
    method = f"{CONFIDENCE:.0%} percentile bootstrap over problems, {RESAMPLES} resamples"
    content = {**run, "intervals": method, "benchmarks": benchmarks}
    write_text(file, json.dumps(content, indent=2) + "\n")


def tokens_per_second(store: SampleStore) -> float:
    """Over the windows of all parts of the run."""
    return sum(w["tokens"] for w in store.windows) / max(sum(w["seconds"] for w in store.windows), 1e-9)


def tables(benchmarks: Mapping[str, Mapping[str, Any]], speeds: Mapping[tuple[str, str], float]) -> list[str]:
    """Accuracy of each benchmark and mode, and what the sparse ones cost; no speed of those of earlier commands."""
    modes = [mode for mode in ("dense", "sparse") if any(mode in one for one in benchmarks.values())]
    header = ["benchmark", "figure", *modes]
    both = len(modes) == 2
    body = [row for name, one in benchmarks.items() for row in _accuracy(name, one, modes)]
    lines = _aligned([header + ["sparse - dense"] * both, *body])
    costs = [["benchmark", "mode", "KV read", "tokens/s", "mean length", "cut", "unscored", "outcomes"]]
    costs += [
        _cost(name, mode, one[mode], speeds.get((name, mode)))
        for name, one in benchmarks.items()
        for mode in modes
        if mode in one
    ]
    notes = [f"intervals: {CONFIDENCE:.0%}, over problems by the bootstrap"]
    if few := [f"{name} ({one['prompts']})" for name, one in benchmarks.items() if one["prompts"] < FEW_PROBLEMS]:
        notes.append(f"few problems, hence wide intervals: {', '.join(few)}")
    return [*lines, "", *_aligned(costs), "", *notes]


def _accuracy(name: str, one: Mapping[str, Any], modes: Sequence[str]) -> Iterable[list[str]]:
    present = [mode for mode in modes if mode in one]
    figures = [key for key, value in one[present[0]].items() if isinstance(value, dict) and "low" in value]
    for figure in figures:
        row = [name, figure, *(_shown(one[mode][figure]) if mode in one else "-" for mode in modes)]
        if len(modes) == 2:
            row.append(_shown(one["sparse_minus_dense"][figure], "+") if "sparse_minus_dense" in one else "-")
        yield row


def _shown(estimate: Mapping[str, Any], sign: str = "") -> str:
    known = Estimate(**estimate)
    text = f"{known.value:{sign}.3f}"
    return text if known.low is None else f"{text} [{known.low:{sign}.3f}, {known.high:{sign}.3f}]"


def _cost(name: str, mode: str, result: Result, speed: float | None) -> list[str]:
    ratio = "-" if result["kv_read_ratio"] is None else f"{result['kv_read_ratio']:.2f}"
    outcomes = ", ".join(f"{key} {value:.0f}" for key, value in result["outcomes"].items()) or "-"
    figures = [
        "-" if speed is None else f"{speed:.0f}",
        f"{result['mean_length']:.0f}",
        f"{result['clipped_ratio']:.1%}",
    ]
    return [name, mode, ratio, *figures, f"{result['unscored']:.0f}", outcomes]


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
