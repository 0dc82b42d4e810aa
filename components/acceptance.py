"""The acceptance tail: how often, at worst, the sparse rollout would have been accepted by the dense policy.

alpha = sum_v min(p_sparse(v), p_dense(v)) at one position, a property of two distributions and not of the sampled
token. Its mean says nothing (a budget with mean .968 collapses, one with .977 is stable); its lower tail does
(arXiv 2606.08446, acceptance rate). The exact value comes from `sparrow.training.logprob.alpha_exact`.

Axes: N or T tokens, K the top-k set of one side.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparrow.errors import UserError

# The paper's .86 is stated for the top-20 estimator, whose dense-against-dense floor reads about .95; the exact value
# lacks those .05, so the same laxness stands at .91.
TAIL = 0.05  # the paper's P5
DEFAULT_TAU = {"exact": 0.91, "top_k": 0.86}


class AcceptanceTail:
    """Which acceptance rate is the headline, and where its alarm stands.

    Args:
        estimator: "exact" (full vocabulary; the rollout keeps its final hidden states) or "top_k" (the paper's lower
            bound from two top-k sets, which needs none).
        top_k: size of the sets, on both sides (paper: 20); the engine and the dense scoring read it.
        bin_width: cached tokens per bin (paper: 2,000).
        tau: the P5 below which `acceptance/below_tau` is 1; None for .91 (exact) or .86 (top_k).

    Raises:
        UserError: unknown estimator or a number outside its range.
    """

    def __init__(
        self,
        estimator: str = "exact",
        top_k: int = 20,
        bin_width: int = 2000,
        tau: float | None = None,
    ) -> None:
        if estimator not in DEFAULT_TAU:
            raise UserError(f"estimator {estimator!r} is neither 'exact' nor 'top_k'")
        if top_k < 1 or bin_width < 1:
            raise UserError(f"top_k {top_k} and bin_width {bin_width} must be at least 1")
        self.estimator = estimator
        self.top_k = top_k
        self.bin_width = bin_width
        self.tau = DEFAULT_TAU[estimator] if tau is None else tau

    @property
    def needs_hidden(self) -> bool:
        """Whether the rollout must keep its final hidden states."""
        return self.estimator == "exact"

    def headline(self, exact_T: Tensor | None, top_k_T: Tensor) -> tuple[Tensor, Tensor | None]:
        """The chosen estimate, and the top-k one beside it where that is not the chosen one.

        Args:
            exact_T: None with the top_k estimator, which keeps no hidden states to compute it from.
            top_k_T: `alpha_top_k` of the same tokens.
        """
        if self.estimator == "top_k":
            return top_k_T, None
        assert exact_T is not None, "the exact estimator needs the rollout's hidden states"
        return exact_T, top_k_T

    def summary(
        self, alpha_T: Tensor, floor_T: Tensor, cached_length_T: Tensor, top_k_T: Tensor | None = None
    ) -> dict[str, float]:
        """Metrics over the tokens given; for the figure of a step, gather the tokens of all ranks first.

        Args:
            alpha_T: the headline estimate, any float dtype.
            floor_T: `top_k_floor` of the same tokens.
            cached_length_T: tokens in the KV cache when each token was sampled.
            top_k_T: the top-k estimate, where the headline is the exact one.

        Returns:
            `acceptance/` p5, p1, p50, mean, frac_below_half, below_tau (1 or 0), per bin p5_bin/<first cached length>
            and tokens_bin/<same> for bins that have tokens, floor_p5, floor_mean, top_k_p5 (with `top_k_T`),
            nonfinite (tokens left out). Without a token only the last.
        """
        finite_T = alpha_T.isfinite()
        metrics = {"nonfinite": float((~finite_T).sum())}
        if finite_T.any():
            metrics |= self._tail(alpha_T[finite_T], cached_length_T[finite_T])
            metrics["floor_p5"] = tail_quantile(floor_T[finite_T], TAIL)
            metrics["floor_mean"] = float(floor_T[finite_T].double().mean())
            if top_k_T is not None:
                metrics["top_k_p5"] = tail_quantile(top_k_T[finite_T], TAIL)
        return {f"acceptance/{name}": value for name, value in metrics.items()}

    def _tail(self, alpha_T: Tensor, cached_length_T: Tensor) -> dict[str, float]:
        p5 = tail_quantile(alpha_T, TAIL)
        metrics = {
            "p1": tail_quantile(alpha_T, 0.01),
            "p5": p5,
            "p50": tail_quantile(alpha_T, 0.5),
            "mean": float(alpha_T.double().mean()),
            "frac_below_half": float((alpha_T < 0.5).double().mean()),
            "below_tau": float(p5 < self.tau),
        }
        for start, (value, tokens) in quantile_by_bin(alpha_T, cached_length_T, self.bin_width, TAIL).items():
            metrics[f"p5_bin/{start}"] = value
            metrics[f"tokens_bin/{start}"] = float(tokens)
        return metrics


def alpha_top_k(
    top_ids_sparse_NK: Tensor, top_logprobs_sparse_NK: Tensor, top_ids_dense_NK: Tensor, top_logprobs_dense_NK: Tensor
) -> Tensor:
    """The paper's estimate [N] of alpha, a lower bound: tokens in both sets count their smaller probability, others 0.

    Log-probs are true ones, over the whole vocabulary at the sampling temperature, and never renormalised over the
    set. Ids are unique within a row; the two sets may differ in size. NaN in a common token stays NaN.
    """
    sorted_ids_NK, order_NK = top_ids_dense_NK.sort(dim=-1)
    # Matching by binary search: comparing all pairs would hold N * K * K entries.
    slot_NK = torch.searchsorted(sorted_ids_NK, top_ids_sparse_NK.contiguous()).clamp(max=sorted_ids_NK.shape[-1] - 1)
    common_NK = sorted_ids_NK.gather(-1, slot_NK) == top_ids_sparse_NK
    dense_NK = top_logprobs_dense_NK.gather(-1, order_NK.gather(-1, slot_NK))
    smaller_NK = torch.minimum(top_logprobs_sparse_NK, dense_NK).exp()
    return torch.where(common_NK, smaller_NK, 0.0).sum(-1).clamp(max=1)


def top_k_floor(top_logprobs_dense_NK: Tensor) -> Tensor:
    """What `alpha_top_k` reads for dense against itself [N]: the probability of its top-k set.

    It is a property of the text's entropy, not of sparsity: no top-k figure is to be read without it.
    """
    return top_logprobs_dense_NK.exp().sum(-1).clamp(max=1)


def quantile_by_bin(
    values_T: Tensor, position_T: Tensor, bin_width: int, quantile: float
) -> dict[int, tuple[float, int]]:
    """Quantile and number of values per bin of positions, keyed by the bin's first position; empty bins are absent."""
    bin_T = position_T // bin_width
    result = {}
    for index in torch.unique(bin_T).tolist():
        members_T = values_T[bin_T == index]
        result[index * bin_width] = (tail_quantile(members_T, quantile), members_T.numel())
    return result


def tail_quantile(values_T: Tensor, quantile: float) -> float:
    """Quantile with linear interpolation between order statistics, as `numpy.quantile`; NaN if any value is NaN.

    Takes at least one value. By a sort, because torch.quantile refuses more than 16M.
    """
    sorted_T = values_T.double().sort().values
    if sorted_T[-1].isnan():
        return math.nan
    position = quantile * (sorted_T.numel() - 1)
    below = math.floor(position)
    above = min(below + 1, sorted_T.numel() - 1)
    return float(torch.lerp(sorted_T[below], sorted_T[above], position - below))
