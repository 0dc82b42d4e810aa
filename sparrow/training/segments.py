"""What is read from fp32 logits: log-prob, entropy and top-k in one pass, the acceptance rate in one more.

On CUDA `sparrow.kernels.score` makes tables of a row's segments; what follows from them is V / 128 of the work, in
plain PyTorch.

Axes: N tokens, V vocabulary, S segments of 128 entries of it, K top-k set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

SEGMENT = 128


@dataclass
class RowScores:
    """Of the distribution at the sampling temperature.

    Attributes:
        normaliser_N: log-sum-exp of logits / temperature.
        entropy_N: in nats.
        maxima_NS: largest logit / temperature of each segment.
    """

    normaliser_N: Tensor
    entropy_N: Tensor
    maxima_NS: Tensor


def score_rows(logits_NV: Tensor, temperature: float) -> RowScores:
    """Of contiguous fp32 logits on CUDA."""
    from sparrow.kernels.score import segment_scores  # Triton is not installed where there is no GPU

    return combine(*segment_scores(logits_NV, temperature))


def combine(maxima_NS: Tensor, sums_NS: Tensor, moments_NS: Tensor) -> RowScores:
    """Combines the tables of `sparrow.kernels.score.segment_scores`; NaN among the logits stays NaN."""
    top_N = maxima_NS.amax(-1)
    # Segments of -inf only weigh nothing; -inf - -inf would be NaN.
    below_NS = torch.where(maxima_NS.isneginf(), -torch.inf, maxima_NS - top_N[:, None])
    weight_NS = below_NS.exp()
    mass_N = (weight_NS * sums_NS).sum(-1)
    # sum e^(x - top) (x - top), by segments: their own moment, and their distance from the top.
    distance_NS = torch.where(below_NS.isneginf(), 0.0, below_NS)
    moment_N = (weight_NS * (moments_NS + distance_NS * sums_NS)).sum(-1)
    return RowScores(top_N + mass_N.log(), mass_N.log() - moment_N / mass_N, maxima_NS)


def top_k_of_rows(logits_NV: Tensor, rows: RowScores, temperature: float, k: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probs [N, K] of finite logits, most probable first.

    All of them lie in the K segments of largest maxima: 2,560 candidates instead of a vocabulary for K = 20.
    """
    vocab, k = logits_NV.shape[1], min(k, logits_NV.shape[1])
    segments_NK = rows.maxima_NS.topk(min(k, rows.maxima_NS.shape[1])).indices
    ids_NC = (segments_NK[..., None] * SEGMENT + torch.arange(SEGMENT, device=logits_NV.device)).flatten(1)
    candidates_NC = logits_NV.gather(1, ids_NC.clamp(max=vocab - 1))
    candidates_NC.masked_fill_(ids_NC >= vocab, -torch.inf)
    best = candidates_NC.topk(k)
    return ids_NC.gather(1, best.indices), best.values / temperature - rows.normaliser_N[:, None]


def alpha_of_logits(sparse_NV: Tensor, dense_NV: Tensor, dense: RowScores, temperature: float) -> Tensor:
    """`sparrow.training.logprob.alpha_exact` [N] from contiguous fp32 logits on CUDA, which stay as they are.

    The sparse ones are read twice, the dense ones, whose normaliser is known, once.
    """
    from sparrow.kernels.difference import summed_difference

    sparse = score_rows(sparse_NV, temperature)
    difference_N = summed_difference(sparse_NV, dense_NV, sparse.normaliser_N, dense.normaliser_N, temperature)
    return (1 - difference_N / 2).clamp(0, 1)


class TargetScores(torch.autograd.Function):
    """Log-prob of the target with gradient, entropy without; logits on CUDA, which the backward overwrites.

    For logits that nobody else reads, and that are made again for each backward: those of a checkpointed chunk.
    """

    @staticmethod
    def forward(ctx: Any, logits_NV: Tensor, targets_N: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        rows = score_rows(logits_NV, temperature)
        ctx.save_for_backward(logits_NV, targets_N, rows.normaliser_N)
        ctx.temperature = temperature
        ctx.mark_non_differentiable(rows.entropy_N)
        return target_logprobs(logits_NV, rows, targets_N, temperature), rows.entropy_N

    @staticmethod
    def backward(ctx: Any, grad_N: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        from sparrow.kernels.score import logits_gradient_

        logits_NV, targets_N, normaliser_N = ctx.saved_tensors
        return logits_gradient_(logits_NV, normaliser_N, targets_N, grad_N, ctx.temperature), None, None


def target_logprobs(logits_NV: Tensor, rows: RowScores, targets_N: Tensor, temperature: float) -> Tensor:
    return logits_NV.gather(-1, targets_N[:, None]).squeeze(-1) / temperature - rows.normaliser_N
