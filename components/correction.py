"""Importance weights between the dense policy and the engine that sampled: the rollout correction.

The tokens come from pi_rollout (sparse attention, other kernels), the loss is about pi_dense. Each token's loss is
multiplied by a constant weight made from ratio = pi_dense / pi_rollout.

Axes: S sequences, T tokens.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sparrow.errors import UserError
from sparrow.training.logprob import LOG_RATIO_LIMIT


class Correction(Protocol):
    """Weights [T] without gradient, and metrics over the tokens given."""

    def __call__(
        self, dense_logprobs_T: Tensor, rollout_logprobs_T: Tensor, sequence_T: Tensor
    ) -> tuple[Tensor, dict[str, float]]: ...


class NoCorrection:
    """Weight 1 for every token: the rollout is taken for a sample of the dense policy."""

    def __call__(
        self, dense_logprobs_T: Tensor, rollout_logprobs_T: Tensor, sequence_T: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Ones [T], no metrics."""
        return torch.ones_like(dense_logprobs_T), {}


class ImportanceCorrection:
    """Truncated or masked importance sampling per token or per sequence.

    - truncate: the ratio clamped to [lower, upper]; per token it is TIS (Yao et al. 2025, "Your Efficient RL Framework
      Secretly Brings You Off-Policy RL Training"), needed in Sparrow (arXiv 2606.08446) even for dense rollouts.
    - mask: the ratio itself inside the bounds and 0 outside; per token it is IcePop (arXiv 2510.18855), per sequence
      MIS (Liu et al. 2025, "When Speed Kills Stability"). Removed tokens still count in the loss denominators.

    Names and metrics follow verl's rollout correction (docs/algo/rollout_corr.md).

    Args:
        level: "token", or "sequence": the product over the sequence's tokens, the same for all of them.
        mode: "truncate" or "mask".
        lower: smallest ratio let through, in [0, 1]; None for no such bound.
        upper: largest ratio let through, at least 1.

    Raises:
        UserError: unknown level or mode, or a bound outside its range.
    """

    def __init__(
        self, level: str = "token", mode: str = "truncate", lower: float | None = None, upper: float = 2.0
    ) -> None:
        if level not in ("token", "sequence"):
            raise UserError(f"level {level!r} is neither 'token' nor 'sequence'")
        if mode not in ("truncate", "mask"):
            raise UserError(f"mode {mode!r} is neither 'truncate' nor 'mask'")
        if upper < 1:
            raise UserError(f"upper {upper} would cut on-policy tokens: it must be at least 1")
        if lower is not None and not 0 <= lower <= 1:
            raise UserError(f"lower {lower} would cut on-policy tokens: it must lie in [0, 1]")
        self.level = level
        self.mode = mode
        self.lower = 0.0 if lower is None else lower
        self.upper = upper

    @torch.no_grad()
    def __call__(
        self, dense_logprobs_T: Tensor, rollout_logprobs_T: Tensor, sequence_T: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """Weights [T] in the dtype of the log-probs, and metrics over the tokens given.

        A non-finite log-ratio gets weight 0 (the whole sequence at the sequence level) and is counted.

        Args:
            dense_logprobs_T: log-probs of the sampled tokens under the dense policy before the update.
            rollout_logprobs_T: the same under the distribution that the engine sampled from.
            sequence_T: index of each token's sequence, int64, from 0.

        Returns:
            weights_T and `rollout_corr/`: rollout_is_mean (mean weight), rollout_is_ratio_fraction_{low,high} (ratio
            beyond the bound, truncated or masked), rollout_rs_masked_fraction (weight 0), nonfinite_ratio (count).
        """
        log_ratio_T = dense_logprobs_T - rollout_logprobs_T
        if self.level == "sequence" and log_ratio_T.numel():
            # inf - inf is NaN and inf + x is inf: one bad token makes its whole sequence non-finite.
            total_S = log_ratio_T.new_zeros(int(sequence_T.max()) + 1).index_add(0, sequence_T, log_ratio_T)
            log_ratio_T = total_S[sequence_T]
        finite_T = log_ratio_T.isfinite()
        ratio_T = log_ratio_T.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        low_T, high_T = finite_T & (ratio_T < self.lower), finite_T & (ratio_T > self.upper)
        kept_T = finite_T & ~low_T & ~high_T if self.mode == "mask" else finite_T
        weights_T = torch.where(kept_T, ratio_T.clamp(self.lower, self.upper), 0.0)
        fractions = {
            "rollout_is_mean": weights_T,
            "rollout_is_ratio_fraction_low": low_T,
            "rollout_is_ratio_fraction_high": high_T,
            "rollout_rs_masked_fraction": ~kept_T,
        }
        metrics = {f"rollout_corr/{name}": float(values_T.double().mean()) for name, values_T in fractions.items()}
        return weights_T, metrics | {"rollout_corr/nonfinite_ratio": float((~finite_T).sum())}
