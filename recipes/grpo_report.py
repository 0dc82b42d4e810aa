"""What a sparrow_grpo run says of itself: rollout figures, samples, and the last lines.

Axes: S sequences, T response tokens.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparrow.engine.generation import EngineStats
from sparrow.models.tokenizer import Tokenizer
from sparrow.protocols import KVCache
from sparrow.rollout import RolloutBatch
from sparrow.tracking.jsonl import read_jsonl
from sparrow.tracking.picture import draw_run
from sparrow.training import distributed
from sparrow.training.run_state import latest_run_state


def decode_responses(batch: RolloutBatch, tokenizer: Tokenizer) -> list[str]:
    """The S responses as text, without the EOS token that ends them; a stop string is part of the text."""
    texts = []
    for s in range(batch.num_sequences):
        ids = batch.tokens_T[batch.slice_of(s)].tolist()
        texts.append(tokenizer.decode(ids[:-1] if ids[-1] in tokenizer.eos_ids else ids))
    return texts


def rollout_metrics(batch: RolloutBatch, cache: KVCache, num_layers: int, stats: EngineStats) -> dict[str, float]:
    """Lengths and what the KV cache read, over all ranks. The first token of a response comes from the prefill."""
    decoded_T = batch.response_position_T > 0
    cached_T = batch.cached_length_T[decoded_T]
    sums = distributed.sum_values(
        {
            "read": float(cache.tokens_read(cached_T, num_layers).double().sum()),
            "dense": float(cached_T.double().sum() * num_layers),
            "pages": float(batch.pages_T[decoded_T].double().sum()),
            "decoded": float(len(cached_T)),
            "preemptions": float(stats.preemptions),
        }
    )
    lengths_S, terminated_S = distributed.gather(batch.lengths_S).double(), distributed.gather(batch.terminated_S)
    metrics = {
        "completions/mean_length": float(lengths_S.mean()),
        "completions/clipped_ratio": float((~terminated_S).double().mean()),
        "completions/tokens": float(lengths_S.sum()),
        "engine/preemptions": sums["preemptions"],
    }
    if terminated_S.any():
        metrics["completions/mean_terminated_length"] = float(lengths_S[terminated_S].mean())
    if sums["decoded"]:
        metrics["budget/mean_pages"] = sums["pages"] / sums["decoded"]
        metrics["budget/kv_read_ratio"] = sums["read"] / sums["dense"]
    return metrics


def print_report(output_dir: Path, saves: Path, tau: float) -> None:
    """What was learnt, what the sparsity saved, and where picture and model are."""
    rows = _rows(output_dir / "metrics.jsonl")
    print("\n".join(["", *_learnt(rows), *_saved(rows, tau)]))
    if rows:
        try:
            draw_run(output_dir / "metrics.jsonl", output_dir / "run.png", tau)
            print(f"picture  {output_dir / 'run.png'}")
        except OSError as error:  # What was learnt is saved; a full disk costs the picture only.
            print(f"picture  not drawn: {error}")
        print(f"report   tune run sparrow_report --run {output_dir}")
    save = latest_run_state(saves)
    print(f"model    {save / 'model' if save is not None else 'not saved'}", flush=True)


def _rows(metrics: Path) -> list[dict[str, float]]:
    """Its numbers; those that are not finite are strings in JSON."""
    rows = [row for row in read_jsonl(metrics) if isinstance(row, dict) and "step" in row]
    return [{key: float(value) for key, value in row.items() if _is_number(value)} for row in rows]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or value in ("nan", "inf", "-inf")


def _learnt(rows: list[dict[str, float]]) -> list[str]:
    lines = []
    for name in dict.fromkeys(key for row in rows for key in row if key.startswith("val/mean@")):
        values = [(row["step"], row[name]) for row in rows if name in row]
        (first, before), (last, after) = values[0], values[-1]
        lines.append(f"learnt   {name} {before:.3f} at step {first:.0f} -> {after:.3f} at step {last:.0f}")
    rewards = [row["reward"] for row in rows if "reward" in row]
    if rewards:
        lines.append(f"reward   {rewards[0]:.3f} -> {rewards[-1]:.3f} (sampled with the rollout's cache)")
    return lines


def _saved(rows: list[dict[str, float]], tau: float) -> list[str]:
    steps = [row for row in rows if "budget/kv_read_ratio" in row]
    if not steps:
        return []
    ratio = sum(row["budget/kv_read_ratio"] for row in steps) / len(steps)
    lines = [f"saved    {1 - ratio:.0%} of the KV entries a dense rollout reads ({ratio:.2f} read, selection included)"]
    bins = {key.rpartition("/")[2]: value for key, value in steps[-1].items() if key.startswith("acceptance/p5_bin/")}
    if bins:
        shown = "  ".join(f"{start}: {value:.3f}" for start, value in bins.items())
        lines.append(f"tail     P5 by cached length at the last step: {shown} (tau {tau})")
    moved = [key for key in steps[-1] if key.startswith("budget/pages_bin/")]
    if moved:
        shown = "  ".join(f"{k.rpartition('/')[2]}: {steps[0][k]:.0f} -> {steps[-1][k]:.0f}" for k in moved)
        lines.append(f"budget   pages by cached length, first and last step: {shown}")
    return lines
