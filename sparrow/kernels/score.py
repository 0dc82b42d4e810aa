"""One pass over fp32 logits: maximum, sum of exponentials and its first moment of every segment of 128.

From these [N, S] tables follow the normaliser, the entropy and the K segments that hold the top-K set, so that logits
are read once and never written again; see `sparrow.training.segments`.

Axes: N tokens, V vocabulary, S segments.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SEGMENT = 128
SEGMENTS_PER_PROGRAM = 16


@triton.jit
def _score_kernel(
    logits, maxima, sums, moments, temperature, vocab, segments, SEGMENT: tl.constexpr, COUNT: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    segment = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    token = segment[:, None] * SEGMENT + tl.arange(0, SEGMENT)[None, :]
    x = tl.load(logits + row * vocab + token, mask=token < vocab, other=float("-inf")) / temperature
    top = tl.max(x, 1)
    below = x - tl.where(top == float("-inf"), 0.0, top)[:, None]
    weight = tl.exp(below)
    inside = segment < segments
    tl.store(maxima + row * segments + segment, top, mask=inside)
    tl.store(sums + row * segments + segment, tl.sum(weight, 1), mask=inside)
    # Where a weight is 0, its logit may be -inf.
    tl.store(moments + row * segments + segment, tl.sum(tl.where(weight > 0, weight * below, 0.0), 1), mask=inside)


@triton.jit
def _gradient_kernel(
    logits, normaliser, targets, gradient, temperature, vocab, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    x = tl.load(logits + row * vocab + token, mask=inside, other=0.0) / temperature
    probability = tl.exp(x - tl.load(normaliser + row))
    hit = (token == tl.load(targets + row)).to(tl.float32)
    tl.store(logits + row * vocab + token, (hit - probability) * (tl.load(gradient + row) / temperature), mask=inside)


def segment_scores(logits_NV: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Of x = logits / temperature in each segment: max x, sum e^(x - max), sum (x - max) e^(x - max); each [N, S]."""
    assert logits_NV.is_contiguous(), logits_NV.stride()
    N, V = logits_NV.shape
    segments = triton.cdiv(V, SEGMENT)
    tables = torch.empty(3, N, segments, dtype=torch.float32, device=logits_NV.device)
    if N:
        _score_kernel[(triton.cdiv(segments, SEGMENTS_PER_PROGRAM), N)](
            logits_NV, *tables, temperature, V, segments, SEGMENT, SEGMENTS_PER_PROGRAM, num_warps=4
        )
    maxima_NS, sums_NS, moments_NS = tables
    return maxima_NS, sums_NS, moments_NS


def logits_gradient_(
    logits_NV: Tensor, normaliser_N: Tensor, targets_N: Tensor, grad_N: Tensor, temperature: float
) -> Tensor:
    """Overwrites the logits by the gradient of sum(grad * log-prob of the target) with respect to them."""
    assert logits_NV.is_contiguous(), logits_NV.stride()
    N, V = logits_NV.shape
    block = SEGMENT * SEGMENTS_PER_PROGRAM
    if N:
        _gradient_kernel[(triton.cdiv(V, block), N)](
            logits_NV, normaliser_N, targets_N, grad_N.contiguous(), temperature, V, block, num_warps=4
        )
    return logits_NV
