"""The acceptance tail: how often, at worst, the sparse rollout would have been accepted by the dense policy.

alpha = sum_v min(p_sparse(v), p_dense(v)) at one position, a property of two distributions and not of the sampled
token. Its mean says nothing (a budget with mean .968 collapses, one with .977 is stable); its lower tail does
(arXiv 2606.08446, acceptance rate). The exact value comes from `sparrow.training.logprob.alpha_exact`.

Axes: N or T tokens, K the top-k set of one side; in sums, N bins and C columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.errors import UserError
from sparrow.tracking.histogram import histogram_metrics
from sparrow.training import distributed
from sparrow.training.logprob import LOG_RATIO_LIMIT
from sparrow.training.quantiles import (
    KL_EDGES,
    UNIT_EDGES,
    BinnedTokens,
    Ordered,
    SortedValues,
    quantile,
)

# The paper's .86 is stated for the top-20 estimator, whose dense-against-dense floor reads about .95; the exact value
# lacks those .05, so the same laxness stands at .91.
TAIL = 0.05  # the paper's P5
DEFAULT_TAU = {"exact": 0.91, "top_k": 0.86}
HISTOGRAM_CELLS = 20
_LEVELS = {"p1": 0.01, "p5": TAIL, "p10": 0.1, "p50": 0.5}
_MEANS = ("mean", "frac_below_half", "kl_k1", "kl_k3", "floor_mean")


@dataclass(frozen=True)
class TailTokens:
    """This rank's tokens of a step, on the CPU.

    Attributes:
        alpha_T: the headline estimate, any float dtype.
        floor_T: `top_k_floor`.
        cached_length_T: tokens in the KV cache when each token was sampled, int64.
        sparse_logprobs_T, dense_logprobs_T: of the sampled token, at the same temperature.
        top_k_T: the top-k estimate, where the headline is the exact one.
        response_position_T: of each token within its response, int64.
    """

    alpha_T: Tensor
    floor_T: Tensor
    cached_length_T: Tensor
    sparse_logprobs_T: Tensor
    dense_logprobs_T: Tensor
    top_k_T: Tensor | None = None
    response_position_T: Tensor | None = None


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
            raise UserError(f"acceptance.estimator: {estimator!r} is neither 'exact' nor 'top_k'")
        if top_k < 1 or bin_width < 1:
            raise UserError(f"acceptance: top_k {top_k} and bin_width {bin_width} must be at least 1")
        self.estimator = estimator
        self.top_k = top_k
        self.bin_width = bin_width
        self.tau = DEFAULT_TAU[estimator] if tau is None else tau
        if not 0 < self.tau <= 1:
            raise UserError(f"acceptance.tau: {tau} must be above 0 and at most 1")

    @property
    def needs_hidden(self) -> bool:
        """Whether the rollout must keep its final hidden states."""
        return self.estimator == "exact"

    @property
    def estimator_name(self) -> str:
        """As schedule files spell it: "exact" or "top_20"."""
        return "exact" if self.estimator == "exact" else f"top_{self.top_k}"

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

    def summary(self, tokens: TailTokens) -> dict[str, float]:
        """Metrics over the tokens of all ranks; collective, each rank gives its own (none is allowed).

        Quantiles are exact in one process and for few tokens, else off by less than 1/4096 (that of k3 by 1.1 %); see
        `sparrow.training.quantiles`. Tokens without a finite alpha are left out.

        Returns:
            `acceptance/` p1, p5, p10, p50, mean, frac_below_half, kl_k1 and kl_k3, each also as
            `<name>_bin/<first cached length>` for bins that have tokens, beside tokens_bin/<same>; below_tau (1 or 0),
            kl_k3_p95, floor_p5, floor_mean, top_k_p5 (with `top_k_T`), p5_response_bin/<first position> (with
            `response_position_T`), histogram/<cell> of alpha, nonfinite. Without a token only the last.
        """
        log_ratio_T = tokens.dense_logprobs_T.double() - tokens.sparse_logprobs_T.double()
        finite_T = tokens.alpha_T.isfinite() & ~log_ratio_T.isnan()
        log_ratio_T = log_ratio_T[finite_T].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        alpha_T, floor_T = tokens.alpha_T[finite_T], tokens.floor_T[finite_T]
        k3_T = (torch.expm1(log_ratio_T) - log_ratio_T).clamp(min=0)
        binned = BinnedTokens(tokens.cached_length_T[finite_T] // self.bin_width)
        metrics = distributed.sum_values({"nonfinite": float((~finite_T).sum())})
        if binned.num_bins:
            columns = [alpha_T, alpha_T < 0.5, -log_ratio_T, k3_T, floor_T]
            whole, bins = binned.whole(alpha_T, UNIT_EDGES), binned.bins(alpha_T, UNIT_EDGES)
            metrics |= self._tail(binned.sums(columns), whole, bins)
            metrics["kl_k3_p95"] = quantile(binned.whole(k3_T, KL_EDGES), 0.95)
            metrics["floor_p5"] = quantile(binned.whole(floor_T, UNIT_EDGES), TAIL)
            if tokens.top_k_T is not None:
                metrics["top_k_p5"] = quantile(binned.whole(tokens.top_k_T[finite_T], UNIT_EDGES), TAIL)
            if tokens.response_position_T is not None:
                metrics |= self._by_response(alpha_T, tokens.response_position_T[finite_T])
            counts_C = torch.histc(alpha_T.double(), HISTOGRAM_CELLS, 0.0, 1.0)
            metrics |= histogram_metrics(distributed.sum_tensor(counts_C).tolist())
        return {f"acceptance/{name}": value for name, value in metrics.items()}

    def _by_response(self, alpha_T: Tensor, position_T: Tensor) -> dict[str, float]:
        """P5 by the paper's bins, which count from the first token of the response."""
        bins = BinnedTokens(position_T // self.bin_width).bins(alpha_T, UNIT_EDGES)
        return {f"p5_response_bin/{n * self.bin_width}": quantile(values, TAIL) for n, values in bins.items()}

    def _tail(self, sums_NC: Tensor, whole: Ordered, bins: dict[int, Ordered]) -> dict[str, float]:
        """From alpha, and sums per bin in the order of `_MEANS`."""
        metrics = _figures(whole, sums_NC.sum(0))
        metrics["below_tau"] = float(metrics["p5"] < self.tau)
        for index, values in bins.items():
            figures = _figures(values, sums_NC[index]) | {"tokens": float(values.count)}
            del figures["floor_mean"]  # a property of the text, not of the position
            metrics |= {f"{name}_bin/{index * self.bin_width}": value for name, value in figures.items()}
        return metrics


def _figures(alpha: Ordered, sums_C: Tensor) -> dict[str, float]:
    means = (sums_C / alpha.count).tolist()
    return {name: quantile(alpha, level) for name, level in _LEVELS.items()} | dict(zip(_MEANS, means, strict=True))


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


def tail_quantile(values_T: Tensor, level: float) -> float:
    """Quantile with linear interpolation between order statistics, as `numpy.quantile`; NaN if any value is NaN.

    Takes at least one value.
    """
    return math.nan if values_T.isnan().any() else quantile(SortedValues(values_T), level)
