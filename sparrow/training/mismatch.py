"""How far the engine that sampled the tokens is from the policy that is trained: one panel of scalars a step.

Everything is computed from the log-probs of the sampled tokens. With l = log pi_dense - log pi_rollout, clamped to
+-20 as in verl, r = exp(l), and means over the T finite tokens sampled from pi_rollout:

| metric | formula | on-policy |
|---|---|---|
| sampling/importance_sampling_ratio/{min,mean,max} | r, before any truncation | 1 |
| sampling/ratio_outside | fraction of r outside [0.5, 2] | 0 |
| rollout_corr/kl | mean(-l), the k1 estimate of KL(rollout, dense); may be negative | 0 |
| rollout_corr/k3_kl | mean(r - 1 - l), the k3 estimate; never negative | 0 |
| rollout_corr/ess | mean(r)^2 / mean(r^2), effective sample size as a fraction of T | 1 |
| rollout_corr/chi2_token | mean(r^2) - 1 | 0 |
| rollout_corr/{rollout_ppl,training_ppl} | mean over sequences of exp(-mean over tokens of the log-prob) | equal |
| engine/logprob_diff_{mean,max} | abs(log pi_dense - log pi_rollout), not clamped | 0 |
| rollout_corr/nonfinite | tokens with a non-finite log-prob on either side; left out of all of the above | 0 |

Names are TRL's (`sampling/`) and verl's (`rollout_corr/`, docs/algo/rollout_corr.md); TRL logs its ratio after
truncation, this is the raw one. Axes: T tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparrow.training.logprob import LOG_RATIO_LIMIT


@torch.no_grad()
def mismatch_panel(rollout_logprobs_T: Tensor, dense_logprobs_T: Tensor, sequence_T: Tensor) -> dict[str, float]:
    """The panel over the tokens given; for a figure of the whole batch, gather the tokens of all ranks first.

    Args:
        rollout_logprobs_T: log-probs under the distribution the engine sampled from.
        dense_logprobs_T: log-probs of the same tokens under the dense policy at the same temperature.
        sequence_T: id of each token's sequence; any integers, unique over ranks.

    Returns:
        The metrics of the module's table; all but the count are NaN when no token is finite.
    """
    finite_T = rollout_logprobs_T.isfinite() & dense_logprobs_T.isfinite()
    nonfinite = {"rollout_corr/nonfinite": float((~finite_T).sum())}
    if not finite_T.any():
        return dict.fromkeys(_NAMES, float("nan")) | nonfinite
    # From here on T counts the finite tokens: selected, not multiplied by a mask, which would turn inf into NaN.
    rollout_T, dense_T = rollout_logprobs_T[finite_T].double(), dense_logprobs_T[finite_T].double()
    sequence_T = sequence_T[finite_T]
    log_ratio_T = (dense_T - rollout_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio_T = log_ratio_T.exp()
    mean, mean_square = ratio_T.mean(), ratio_T.square().mean()
    difference_T = (dense_T - rollout_T).abs()
    values = [
        ratio_T.min(),
        mean,
        ratio_T.max(),
        ((ratio_T < 0.5) | (ratio_T > 2.0)).double().mean(),
        -log_ratio_T.mean(),
        (torch.expm1(log_ratio_T) - log_ratio_T).mean(),
        mean.square() / mean_square,
        mean_square - 1,
        _perplexity(rollout_T, sequence_T),
        _perplexity(dense_T, sequence_T),
        difference_T.mean(),
        difference_T.max(),
    ]
    return dict(zip(_NAMES, torch.stack(values).tolist(), strict=True)) | nonfinite


def _perplexity(logprobs_T: Tensor, sequence_T: Tensor) -> Tensor:
    """Mean over sequences of exp(-mean log-prob of the sequence's tokens)."""
    _, index_T, count_S = torch.unique(sequence_T, return_inverse=True, return_counts=True)
    total_S = torch.zeros_like(count_S, dtype=logprobs_T.dtype).index_add(0, index_T, logprobs_T)
    perplexity: Tensor = (-total_S / count_S).exp().mean()
    return perplexity


_NAMES = (
    "sampling/importance_sampling_ratio/min",
    "sampling/importance_sampling_ratio/mean",
    "sampling/importance_sampling_ratio/max",
    "sampling/ratio_outside",
    "rollout_corr/kl",
    "rollout_corr/k3_kl",
    "rollout_corr/ess",
    "rollout_corr/chi2_token",
    "rollout_corr/rollout_ppl",
    "rollout_corr/training_ppl",
    "engine/logprob_diff_mean",
    "engine/logprob_diff_max",
)
