"""Policy losses per token; `components.aggregation` says how they are summed.

Two ratios are kept apart: the loss sees the policy's own movement, logprobs - old_logprobs, both dense; what separates
the dense policy from the sparse rollout is in `correction_T`, a constant weight per token.

Axes: S sequences and T response tokens of one micro-batch; sequences are whole, one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from sparrow.errors import UserError
from sparrow.training.logprob import LOG_RATIO_LIMIT


@dataclass
class LossInputs:
    """The tokens of one micro-batch.

    Attributes:
        logprobs_T: log-probs of the sampled tokens under the policy being trained, with gradient.
        old_logprobs_T: the same before the first update of this batch (dense).
        advantages_T: advantage of the token's sequence.
        correction_T: weight from `components.correction`; 0 removes the token, whatever its other values are.
        sequence_T: index into `lengths_S` of each token's sequence, int64.
        lengths_S: response tokens per sequence, int64.
        ref_logprobs_T: log-probs under the reference policy, for `kl_penalty`; None without a KL term.
    """

    logprobs_T: Tensor
    old_logprobs_T: Tensor
    advantages_T: Tensor
    correction_T: Tensor
    sequence_T: Tensor
    lengths_S: Tensor
    ref_logprobs_T: Tensor | None = None


@dataclass
class LossOutput:
    """Losses per token, with gradient, and metrics.

    Every metric is a sum over the tokens that went in (fp64 scalar, detached): add them over the micro-batches and
    ranks of an optimizer step, and divide by the number of those tokens. `clip_ratio/{low,high,dual}` count tokens
    whose gradient or weight the bound cut; `ppo_kl` sums old_logprob - logprob; `loss/nonfinite` counts tokens with a
    NaN or infinite loss.
    """

    loss_T: Tensor
    metrics: dict[str, Tensor]


class Loss(Protocol):
    """A policy loss: one value per token, smaller is better."""

    def __call__(self, inputs: LossInputs) -> LossOutput: ...


class ClippedSurrogate:
    """PPO's clipped surrogate, -min(r A, clip(r, 1 - low, 1 + high) A), with r the token's ratio.

    Arguments default to Sparrow's recipe (arXiv 2606.08446): clip-higher (DAPO, arXiv 2503.14476, 3.1) and dual clip.

    Args:
        clip_low, clip_high: distance of the bounds from 1, below and above.
        dual_clip: for A < 0 the loss is at most -dual_clip * A, so that a token whose ratio exploded is left alone
            (arXiv 1912.09729, eq. 5); > 1, or None for no such bound.

    Raises:
        UserError: a bound outside its range.
    """

    def __init__(self, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = 3.0) -> None:
        _check_clip(clip_low, clip_high)
        if dual_clip is not None and dual_clip <= 1:
            raise UserError(f"dual_clip {dual_clip} would cut tokens inside the clip range: it must exceed 1")
        self.clip_low = clip_low
        self.clip_high = clip_high
        self.dual_clip = dual_clip

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Loss of each token of the micro-batch."""
        inputs = _without_removed(inputs)
        log_ratio_T, advantages_T = _log_ratio(inputs), inputs.advantages_T
        ratio_T = log_ratio_T.exp()
        objective_T, clipped = _clipped_objective(ratio_T, advantages_T, self.clip_low, self.clip_high)
        if self.dual_clip is not None:
            floor_T = self.dual_clip * advantages_T
            clipped["dual"] = (advantages_T < 0) & (objective_T < floor_T)
            objective_T = torch.where(clipped["dual"], floor_T, objective_T)
        return _output(inputs, log_ratio_T, objective_T, clipped)


def grpo(clip_low: float = 0.2, clip_high: float = 0.2) -> ClippedSurrogate:
    """GRPO (arXiv 2402.03300, 4.1): symmetric clip; belongs with seq-mean-token-mean and normalize_std: true."""
    return ClippedSurrogate(clip_low, clip_high, dual_clip=None)


def dr_grpo(clip_low: float = 0.2, clip_high: float = 0.2) -> ClippedSurrogate:
    """Dr. GRPO (arXiv 2503.20783, 3.2): GRPO's clip; belongs with seq-mean-token-sum-norm and normalize_std: false."""
    return ClippedSurrogate(clip_low, clip_high, dual_clip=None)


def dapo(clip_low: float = 0.2, clip_high: float = 0.28) -> ClippedSurrogate:
    """DAPO (arXiv 2503.14476, 3): clip-higher; belongs with token-mean and zero_variance: drop, without a KL term."""
    return ClippedSurrogate(clip_low, clip_high, dual_clip=None)


class GSPO:
    """Group sequence policy optimization (arXiv 2507.18071, 4.1): ratio and clip are those of the whole sequence.

    The ratio is s = exp(mean_t (logprob - old_logprob)), its gradient that of the mean. A token removed by the
    correction adds 0 to the sum and still counts in the length. Belongs with seq-mean-token-mean.

    Args:
        clip_low, clip_high: distance of the bounds from 1; a geometric mean hardly moves, hence 3e-4 and 4e-4 (5.1).

    Raises:
        UserError: a bound outside its range.
    """

    def __init__(self, clip_low: float = 3e-4, clip_high: float = 4e-4) -> None:
        _check_clip(clip_low, clip_high)
        self.clip_low = clip_low
        self.clip_high = clip_high

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Loss of each token of the micro-batch, equal for the tokens of a sequence up to the correction."""
        inputs = _without_removed(inputs)
        log_ratio_T = _log_ratio(inputs)
        sum_S = torch.zeros_like(inputs.lengths_S, dtype=log_ratio_T.dtype).index_add(0, inputs.sequence_T, log_ratio_T)
        # A dummy sequence may be empty; no token ever reads its mean.
        ratio_T = (sum_S / inputs.lengths_S.clamp(min=1)).exp()[inputs.sequence_T]
        objective_T, clipped = _clipped_objective(ratio_T, inputs.advantages_T, self.clip_low, self.clip_high)
        return _output(inputs, log_ratio_T, objective_T, clipped)


class CISPO:
    """Clipped IS-weight policy optimization (arXiv 2506.13585, 3.1): -sg(min(r, max_ratio)) A logprob.

    The clip bounds a constant weight, so no token loses its gradient. As in the paper there is no lower bound.
    Belongs with token-mean.

    Args:
        max_ratio: largest weight, 1 + eps_high in the paper, which prints no value; 5 is that of arXiv 2510.13786.

    Raises:
        UserError: max_ratio below 1.
    """

    def __init__(self, max_ratio: float = 5.0) -> None:
        if max_ratio < 1:
            raise UserError(f"max_ratio {max_ratio} would cut on-policy tokens: it must be at least 1")
        self.max_ratio = max_ratio

    def __call__(self, inputs: LossInputs) -> LossOutput:
        """Loss of each token of the micro-batch."""
        inputs = _without_removed(inputs)
        log_ratio_T = _log_ratio(inputs)
        ratio_T = log_ratio_T.detach().exp()
        objective_T = ratio_T.clamp(max=self.max_ratio) * inputs.advantages_T * inputs.logprobs_T
        clipped = {"high": (ratio_T > self.max_ratio) & (inputs.advantages_T != 0)}
        return _output(inputs, log_ratio_T, objective_T, clipped)


def kl_penalty(logprobs_T: Tensor, ref_logprobs_T: Tensor) -> Tensor:
    """k3 estimate [T] of KL(policy, reference): exp(d) - 1 - d with d = ref - logprob, clamped to +-20; never negative.

    Source: Schulman, "Approximating KL divergence" (2020); the GRPO paper's eq. 4. Its expectation is the KL on-policy
    only. Add it to `LossOutput.loss_T` with its coefficient, before aggregation; the correction does not weigh it, so
    a removed token with a non-finite log-prob is still NaN here.
    """
    delta_T = (ref_logprobs_T - logprobs_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    return torch.expm1(delta_T) - delta_T


def _without_removed(inputs: LossInputs) -> LossInputs:
    """The inputs with 0 for all values of a removed token: neither 0 * inf nor NaN reaches loss or gradient."""
    kept_T = inputs.correction_T != 0
    return replace(
        inputs,
        logprobs_T=torch.where(kept_T, inputs.logprobs_T, 0.0),
        old_logprobs_T=torch.where(kept_T, inputs.old_logprobs_T, 0.0),
        advantages_T=torch.where(kept_T, inputs.advantages_T, 0.0),
    )


def _log_ratio(inputs: LossInputs) -> Tensor:
    return (inputs.logprobs_T - inputs.old_logprobs_T).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _clipped_objective(
    ratio_T: Tensor, advantages_T: Tensor, low: float, high: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """min(r A, clip(r) A), and where a bound took the token's gradient away (as TRL counts it)."""
    clipped_T = ratio_T.clamp(1 - low, 1 + high)
    clipped = {
        "low": (ratio_T < 1 - low) & (advantages_T < 0),
        "high": (ratio_T > 1 + high) & (advantages_T > 0),
    }
    return torch.minimum(ratio_T * advantages_T, clipped_T * advantages_T), clipped


def _output(inputs: LossInputs, log_ratio_T: Tensor, objective_T: Tensor, clipped: dict[str, Tensor]) -> LossOutput:
    loss_T = -inputs.correction_T * objective_T
    per_token = {f"clip_ratio/{name}": clipped_T for name, clipped_T in clipped.items()}
    per_token |= {"ppo_kl": -log_ratio_T.detach(), "loss/nonfinite": ~loss_T.detach().isfinite()}
    return LossOutput(loss_T, {name: values_T.sum(dtype=torch.float64) for name, values_T in per_token.items()})


def _check_clip(clip_low: float, clip_high: float) -> None:
    if not 0 < clip_low <= 1:
        raise UserError(f"clip_low {clip_low} is a distance below 1: it must lie in (0, 1]")
    if clip_high <= 0:
        raise UserError(f"clip_high {clip_high} is a distance above 1: it must be positive")
