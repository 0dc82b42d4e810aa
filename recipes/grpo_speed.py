"""How much faster decoding is than with a dense cache: by the cost model for each step, by the clock now and then.

Axes: S sequences, T response tokens.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from sparrow.components.kv_cache import DenseKVCache, SparseKVCache
from sparrow.cost import Work, decode_cost
from sparrow.engine.engine import Engine, EngineConfig
from sparrow.engine.sampler import SamplingParams
from sparrow.models.decoder import Decoder
from sparrow.models.decoder_config import DecoderConfig
from sparrow.protocols import KVCache
from sparrow.rates import Rates
from sparrow.recipes.cost_config import cache_shape
from sparrow.rollout import RolloutBatch
from sparrow.tracking.console import say
from sparrow.training import distributed

STEPS_PER_LOOK = 16
STEPS = 4 * STEPS_PER_LOOK  # the first look is not timed
SEED = 0


def modelled_speedup(
    batch: RolloutBatch, model: DecoderConfig, cache: KVCache, dense: DenseKVCache, rows: int, rates: Rates
) -> dict[str, float]:
    """`speedup/model`: seconds of decoding this batch with a dense cache over those with `cache`, all ranks together.

    The roofline of docs/cost.md, without latencies. Nothing for a cache that the cost model does not know.
    """
    if not isinstance(cache, SparseKVCache):
        return {}
    assert batch.num_sequences, "every rank has a prompt of its own, and keeps one"
    prompts_S = torch.tensor([len(prompt) for prompt in batch.prompts])
    work = Work(prompts_S, batch.lengths_S, min(rows, batch.num_sequences))
    tokens_L, steps_R = work.tokens_L(), work.steps_R()
    seconds = {
        name: decode_cost(model, cache_shape(kind), tokens_L, steps_R).seconds(rates)
        for name, kind in (("dense", dense), ("sparse", cache))
    }
    seconds = distributed.sum_values(seconds)
    return {"speedup/model": seconds["dense"] / seconds["sparse"]} if seconds["sparse"] else {}


def measured_speedup(
    batch: RolloutBatch, model: Decoder, cache: KVCache, dense: DenseKVCache, config: EngineConfig
) -> dict[str, float]:
    """`speedup/measured`: time of a decode step with a dense cache over that with `cache`, on rows of this batch.

    The rows are responses cut at the median cached length of the batch's tokens, `speedup/context`, as many as have
    room; nothing ends them, and both caches decode the same number of steps. Prefill and the first steps, which capture
    CUDA graphs, are not timed. Collective: the weights may be shared by the ranks.
    """
    rows, context = _rows(batch, cache.block_size, config, model.config.max_position_embeddings - STEPS)
    if not all(distributed.gather_objects(bool(rows))):
        if distributed.rank() == 0:
            say(f"speedup/measured is left out: engine.kv_tokens {config.kv_tokens} has no room for a row of it")
        return {}
    limits = replace(config, max_new_tokens=STEPS, max_rows=len(rows), steps_per_look=STEPS_PER_LOOK)
    seconds = [_step_seconds(model, kind, limits, rows) for kind in (dense, cache)]
    total = distributed.sum_values({"dense": seconds[0], "sparse": seconds[1], "context": float(context)})
    context_mean = total["context"] / distributed.world_size()
    return {"speedup/measured": total["dense"] / total["sparse"], "speedup/context": context_mean}


def _rows(batch: RolloutBatch, block_size: int, config: EngineConfig, longest: int) -> tuple[list[list[int]], int]:
    """Token ids of the rows, and how many each has; none where the pool has no room for one."""
    context = max(1, min(int(batch.cached_length_T.median()), longest))
    blocks = -(-(context + STEPS) // block_size) + 1
    room = min(config.max_rows, config.kv_tokens // block_size // blocks)
    texts = [
        (batch.prompts[s] + batch.tokens_T[batch.slice_of(s)].tolist())[:context]
        for s in range(batch.num_sequences)
        if len(batch.prompts[s]) + int(batch.lengths_S[s]) >= context
    ]
    return [texts[row % len(texts)] for row in range(room)], context


def _step_seconds(model: Decoder, cache: KVCache, config: EngineConfig, rows: list[list[int]]) -> float:
    """Of one decode step of all rows."""
    engine = Engine(model, cache, (), config, SEED)
    looks: list[tuple[float, int]] = []
    engine.generate(rows, 1, SamplingParams(), on_step=lambda tokens, _: looks.append((time.perf_counter(), tokens)))
    engine.sleep()
    (begin, before), (end, after) = looks[0], looks[-1]
    return (end - begin) / (after - before) * len(rows)
