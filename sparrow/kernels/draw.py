"""Sampling from logits in two kernels: inverse CDF, the token's log-prob, and the top-K set.

The first reads the logits once and keeps maximum and sum of exponentials of every segment of 128. The second, one
program per row, finds the segment and in it the token at the drawn point of the CDF; the top-K tokens all lie in the K
segments of largest maxima. It draws what `sparrow.engine.sampler.sample` draws from the same number, up to rounding.

Axes: B rows, V vocabulary, S segments, K the top-k set.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparrow.kernels.launch import await_predecessor, dependent_launch, release_successor
from sparrow.kernels.ordering import LOWEST, largest, sortable

SEGMENT = 128
SEGMENTS_PER_PROGRAM = 16


@triton.jit
def _segment_kernel(
    logits, maxima, sums, temperature, vocab, segments, SEGMENT: tl.constexpr, COUNT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(PDL)
    release_successor(PDL)
    row = tl.program_id(1).to(tl.int64)
    segment = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    token = segment[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    x = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf")) / temperature
    top = tl.max(x, 1)
    inside = segment < segments
    tl.store(maxima + row * segments + segment, top, mask=inside)
    tl.store(sums + row * segments + segment, tl.sum(tl.exp(x - top[:, None]), 1), mask=inside)


@triton.jit
def _draw_kernel(
    logits, maxima, sums, uniforms, tokens, logprobs, top_ids, top_logprobs, scratch, temperature, vocab, segments,
    top_k, GREEDY: tl.constexpr, SEGMENT: tl.constexpr, P: tl.constexpr, K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    await_predecessor(PDL)
    row = tl.program_id(0).to(tl.int64)
    segment = tl.arange(0, P)
    inside = segment < segments
    peak = tl.load(maxima + row * segments + segment, mask=inside, other=float("-inf"))
    top = tl.max(peak, 0)
    share = tl.load(sums + row * segments + segment, mask=inside, other=0.0)
    mass = (tl.where(inside, tl.exp(peak - top), 0.0) * share).to(tl.float64)
    normaliser = top + tl.log(tl.sum(mass, 0)).to(tl.float32)

    # The K segments of largest maxima, in order, through a scratch row of this program's own.
    wanted = tl.minimum(top_k, segments)
    chosen = largest(tl.where(inside, sortable(peak), LOWEST), wanted, segments)
    tl.store(scratch + row * K + tl.cumsum(chosen.to(tl.int32), 0) - 1, segment, mask=chosen)
    tl.debug_barrier()
    slot = tl.arange(0, K)
    picked = tl.load(scratch + row * K + slot, mask=slot < wanted, other=0)
    flat = tl.arange(0, K * SEGMENT)
    place = flat // SEGMENT
    token = tl.sum(tl.where(place[:, None] == slot[None, :], picked[None, :], 0), 1) * SEGMENT + flat % SEGMENT
    valid = (place < wanted) & (token < vocab)
    x = tl.load(logits + row * vocab + token, mask=valid, other=float("-inf")) / temperature
    best = largest(tl.where(valid, sortable(x), LOWEST), top_k, tl.sum(valid.to(tl.int32), 0))
    tl.debug_barrier()
    tl.store(scratch + row * K + tl.cumsum(best.to(tl.int32), 0) - 1, token, mask=best)
    tl.debug_barrier()
    winner = tl.load(scratch + row * K + slot, mask=slot < top_k, other=0)
    value = tl.load(logits + row * vocab + winner, mask=slot < top_k, other=float("-inf")) / temperature
    # Sorted by value, ties by token: one int64 key holds both.
    packed = (sortable(value).to(tl.int64) << 32) | (0x7FFFFFFF - winner).to(tl.int64)
    ranked = tl.sort(tl.where(slot < top_k, packed, -(2**63)), descending=True)
    ids = 0x7FFFFFFF - (ranked & 0xFFFFFFFF).to(tl.int32)
    in_order = tl.load(logits + row * vocab + ids, mask=slot < top_k, other=0.0) / temperature
    tl.store(top_ids + row * top_k + slot, ids, mask=slot < top_k)
    tl.store(top_logprobs + row * top_k + slot, in_order - normaliser, mask=slot < top_k)

    if GREEDY:
        token_drawn = tl.max(tl.where(slot == 0, ids, 0), 0)
        tl.store(tokens + row, token_drawn.to(tl.int64))
        tl.store(logprobs + row, 0.0)
    else:
        cumulative = tl.cumsum(mass, 0)
        total = tl.max(cumulative, 0)
        point = tl.load(uniforms + row) * total
        home = tl.sum(((cumulative <= point) & inside).to(tl.int32), 0)
        home = tl.minimum(home, segments - 1)
        before = tl.sum(tl.where(segment < home, mass, 0.0), 0)
        lane = tl.arange(0, SEGMENT)
        at = home * SEGMENT + lane
        y = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")) / temperature
        weight = tl.exp(y - top).to(tl.float64)
        passed = tl.sum(((before + tl.cumsum(weight, 0)) <= point).to(tl.int32), 0)
        # Rounding may step over the segment's end: stay at its last token of non-zero probability.
        last = tl.max(tl.where(weight > 0, lane, 0), 0)
        drawn = home * SEGMENT + tl.minimum(passed, last)
        tl.store(tokens + row, drawn.to(tl.int64))
        tl.store(logprobs + row, tl.load(logits + row * vocab + drawn) / temperature - normaliser)


def draw(logits_BV: Tensor, uniform_B: Tensor, temperature: float, top_k: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens [B] int64, log-probs [B] fp32, top-K ids [B, K] int32 and log-probs [B, K] fp32, most probable first.

    Args:
        logits_BV: fp32, finite.
        uniform_B: fp64 in [0, 1).
        temperature: 0 is greedy: log-prob 0, the top-K set at temperature 1.
        top_k: K, at most the vocabulary.
    """
    B, V = logits_BV.shape
    device = logits_BV.device
    segments = triton.cdiv(V, SEGMENT)
    maxima, sums = (torch.empty(B, segments, dtype=torch.float32, device=device) for _ in range(2))
    tokens_B = torch.empty(B, dtype=torch.int64, device=device)
    logprobs_B = torch.empty(B, dtype=torch.float32, device=device)
    top_ids_BK = torch.empty(B, top_k, dtype=torch.int32, device=device)
    top_logprobs_BK = torch.empty(B, top_k, dtype=torch.float32, device=device)
    padded_k = max(triton.next_power_of_2(top_k), 2)
    scratch = torch.empty(B, padded_k, dtype=torch.int32, device=device)
    pdl = dependent_launch()
    divisor = temperature or 1.0
    _segment_kernel[(triton.cdiv(segments, SEGMENTS_PER_PROGRAM), B)](
        logits_BV, maxima, sums, divisor, V, segments, SEGMENT, SEGMENTS_PER_PROGRAM, pdl, num_warps=4,
        launch_pdl=pdl,
    )  # fmt: skip
    _draw_kernel[(B,)](
        logits_BV, maxima, sums, uniform_B, tokens_B, logprobs_B, top_ids_BK, top_logprobs_BK, scratch, divisor, V,
        segments, top_k, temperature == 0, SEGMENT, triton.next_power_of_2(segments), padded_k, pdl, num_warps=8,
        launch_pdl=pdl,
    )  # fmt: skip
    return tokens_B, logprobs_B, top_ids_BK, top_logprobs_BK
