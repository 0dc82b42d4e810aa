"""Sparse attention of a training forward beside dense attention of the same tokens: one layer, forward and backward.

Random keys and random queries, which a trained model's are not: how alike neighbouring queries are is an option,
because it decides how many pages a tile of them reads.

Axes: T packed tokens, H query heads, K KV heads, D head dim.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from rollout_shapes import kv_cache, model_config
from torch import Tensor
from training_logprob import timed

from sparrow.attention.dense import DenseAttention
from sparrow.attention.sparse import SparseAttention
from sparrow.errors import UserError
from sparrow.protocols import Attention


def measure_attention(
    model: str, tokens: int, prompt: int, schedule: str, selector: str, likeness: float, device: torch.device
) -> dict[str, Any]:
    """Seconds of selection, forward, and forward and backward of one document; extra memory on CUDA.

    Args:
        prompt: the first tokens, which are dense.
        likeness: correlation of each query with the one before it, 0 to 1.
    """
    if not 0 <= likeness <= 1:
        raise UserError(f"--likeness {likeness}: from 0 to 1")
    config, cache = model_config(model), kv_cache(schedule, selector, "auto")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shapes = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
    inputs = [torch.randn(tokens, heads, config.head_dim, device=device) for heads in shapes]
    _liken(inputs[0], likeness)
    q_THD, k_TKD, v_TKD = (x.to(dtype).requires_grad_() for x in inputs)
    sparse = cache.training([tokens], [prompt], device)
    layer = sparse.pattern.dense_layers if isinstance(sparse, SparseAttention) else 0
    result = {
        "model": model, "tokens": tokens, "prompt": prompt, "schedule": schedule, "selector": selector,
        "likeness": likeness, "sparse": _measure(sparse, layer, q_THD, k_TKD, v_TKD, device),
        "dense": _measure(DenseAttention("auto", [tokens], device), layer, q_THD, k_TKD, v_TKD, device),
    }  # fmt: skip
    return result | _selection(sparse, q_THD.detach(), k_TKD.detach(), device)


def show_attention(result: dict[str, Any]) -> str:
    lines = [
        f"{result['model']}: one layer, {result['tokens']} tokens, {result['prompt']} of them prompt, "
        f"{result['schedule']}, likeness {result['likeness']}"
    ]
    for name in ("dense", "sparse"):
        part = result[name]
        memory = "" if part["extra_bytes"] is None else f", {part['extra_bytes'] / 2**30:.2f} GiB"
        lines.append(
            f"  {name}: forward {part['forward_s'] * 1e3:.1f} ms, and backward {part['both_s'] * 1e3:.1f} ms{memory}"
        )
    if "select_s" in result:
        lines.append(
            f"  selection {result['select_s'] * 1e3:.1f} ms; pages per query {result['pages_per_query']:.0f}, of a "
            f"tile of {result['queries_per_tile']} queries {result['pages_per_tile']:.0f}"
        )
    return "\n".join(lines)


def _measure(attention: Attention, layer: int, q: Tensor, k: Tensor, v: Tensor, device: torch.device) -> dict[str, Any]:
    grad_THD = torch.randn_like(q)

    @torch.no_grad()
    def forward() -> None:
        attention(layer, q, k, v)

    def both() -> None:
        for x in (q, k, v):
            x.grad = None
        attention(layer, q, k, v).backward(grad_THD)

    forward_s, _ = timed(forward, device)
    both_s, extra = timed(both, device)
    return {"forward_s": forward_s, "both_s": both_s, "extra_bytes": extra}


def _selection(attention: Any, q_THD: Tensor, k_TKD: Tensor, device: torch.device) -> dict[str, Any]:
    """Nothing where a mask is used, whose selection cannot be told from the rest."""
    tiled = getattr(attention, "chosen", None)
    if getattr(tiled, "tiles", None) is None:
        return {}
    from sparrow.attention.tile_lists import page_lists

    tiles, heads = tiled.tiles, k_TKD.shape[1]
    lists = page_lists(tiled.pattern, tiles, q_THD, k_TKD)
    select_s, _ = timed(partial(page_lists, tiled.pattern, tiles, q_THD, k_TKD), device)
    bits = (lists.entries_N[:, None] >> 16 >> torch.arange(tiles.queries, device=device)) & 1
    queries = sum(document.end - document.first for document in tiles.documents)
    return {
        "select_s": select_s, "queries_per_tile": tiles.queries,
        "pages_per_query": int(bits.sum()) / heads / queries,
        "pages_per_tile": len(lists.entries_N) / heads / len(tiles.tiles_X4),
    }  # fmt: skip


def _liken(q_THD: Tensor, likeness: float) -> None:
    fresh = (1 - likeness**2) ** 0.5
    for t in range(1, len(q_THD)):
        q_THD[t].mul_(fresh).add_(q_THD[t - 1], alpha=likeness)
