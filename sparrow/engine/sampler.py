"""Sampling one token per row, with the log-prob of the distribution it was drawn from.

Axes: B rows, V vocabulary, K the top-k set kept for the acceptance rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sparrow.errors import UserError

# Logits over it stay far from what fp32 can hold; a gap of .001 is then already one of 100 nats.
LOWEST_TEMPERATURE = 1e-5


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Neutral by default: what is not set here is not set anywhere, a checkpoint's generation_config included.

    Attributes:
        temperature: divides the logits, at least 1e-5; 0 is greedy.
        top_k: keep the k most probable tokens; 0 keeps all.
        top_p: keep the smallest set with at least this probability.
        min_p: keep tokens at least this share as probable as the best.
        stop: strings that end a response, see `sparrow.engine.stop`.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop: list[str] = field(default_factory=list, hash=False)

    def __post_init__(self) -> None:
        if not (self.temperature == 0 or LOWEST_TEMPERATURE <= self.temperature < math.inf):
            raise UserError(
                f"sampling.temperature: {self.temperature} is neither 0 (greedy) nor finite and at least "
                f"{LOWEST_TEMPERATURE}"
            )
        if self.top_k < 0:
            raise UserError(f"sampling.top_k: {self.top_k} is below 0")
        if not 0 < self.top_p <= 1:
            raise UserError(f"sampling.top_p: {self.top_p} is not in (0, 1]")
        if not 0 <= self.min_p < 1:
            raise UserError(f"sampling.min_p: {self.min_p} is not in [0, 1)")
        if "" in self.stop:
            raise UserError(f"sampling.stop: {self.stop} has an empty string, which every text contains")

    @property
    def truncates(self) -> bool:
        """Whether tokens can be cut from the distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


@dataclass
class Sample:
    """One sampled token per row; see `RolloutBatch` for the meaning of the fields."""

    tokens_B: Tensor
    logprobs_B: Tensor
    top_ids_BK: Tensor
    top_logprobs_BK: Tensor


def sample(logits_BV: Tensor, uniform_B: Tensor, params: SamplingParams, top_k: int) -> Sample:
    """Inverse-CDF sampling with one uniform number per row, by device operations only: a CUDA graph can hold it.

    Args:
        logits_BV: fp32.
        uniform_B: fp64 in [0, 1), see `sparrow.engine.philox`.
        top_k: K, at most the vocabulary.

    Returns:
        The tokens, their log-prob under the sampling distribution (after temperature and truncation; 0 where greedy),
        and the top-K of the untruncated distribution at that temperature (at 1 where greedy).
    """
    logprobs_BV = (logits_BV / (params.temperature or 1.0)).log_softmax(-1)
    top = logprobs_BV.topk(top_k, dim=-1)
    if params.temperature == 0:
        best_B = logits_BV.argmax(-1)
        return Sample(best_B, torch.zeros_like(logprobs_BV[:, 0]), top.indices, top.values)
    if params.truncates:
        logprobs_BV = _truncate(logprobs_BV, params).log_softmax(-1)
    tokens_B = _inverse_cdf(logprobs_BV, uniform_B)
    chosen_B = logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
    return Sample(tokens_B, chosen_B, top.indices, top.values)


def _inverse_cdf(logprobs_BV: Tensor, uniform_B: Tensor) -> Tensor:
    # fp64: the sum over 150K probabilities must not lose the small ones.
    cdf_BV = logprobs_BV.double().exp().cumsum(-1)
    # right=True steps over tokens of probability 0, whose cdf equals their predecessor's.
    tokens_B = torch.searchsorted(cdf_BV, (uniform_B * cdf_BV[:, -1])[:, None], right=True)[:, 0]
    return tokens_B.clamp(max=logprobs_BV.shape[-1] - 1)


def _truncate(logprobs_BV: Tensor, params: SamplingParams) -> Tensor:
    """-inf where top-k, min-p or top-p (in this order, each on what is left) cut a token."""
    if params.top_k:
        floor_B1 = logprobs_BV.topk(min(params.top_k, logprobs_BV.shape[-1]), dim=-1).values[:, -1:]
        logprobs_BV = torch.where(logprobs_BV >= floor_B1, logprobs_BV, -torch.inf)
    if params.min_p:
        floor_B1 = logprobs_BV.amax(-1, keepdim=True) + math.log(params.min_p)
        logprobs_BV = torch.where(logprobs_BV >= floor_B1, logprobs_BV, -torch.inf)
    if params.top_p < 1:
        ordered = logprobs_BV.sort(dim=-1, descending=True)
        probability_BV = ordered.values.softmax(-1)
        # A token stays while the mass before it is below p: the one that crosses p is kept.
        before_BV = probability_BV.cumsum(-1) - probability_BV
        kept_BV = torch.zeros_like(before_BV, dtype=torch.bool).scatter(1, ordered.indices, before_BV < params.top_p)
        logprobs_BV = torch.where(kept_BV, logprobs_BV, -torch.inf)
    return logprobs_BV
