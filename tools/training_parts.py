"""Seconds of the parts of the training half of an RL step: of one micro-batch, and of the optimizer.

The work is the recipe's (`recipes/sparrow_grpo.py`, `grpo_update.py`). Each part runs twice, and the second run counts.

Axes: N response tokens of one micro-batch, E hidden size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from sparrow.attention.dense import DenseAttention, DenseBackend
from sparrow.components.acceptance import AcceptanceTail, TailTokens, alpha_top_k, top_k_floor
from sparrow.models.decoder import Decoder
from sparrow.rollout import RolloutBatch
from sparrow.training.logprob import DenseScores, score_tokens, token_logprobs
from sparrow.training.packing import MicroBatch, response_hidden
from sparrow.training.sharded_state import Optimizer
from sparrow.training.sharding import clip_gradients, release

MAX_GRAD_NORM = 1.0
T = TypeVar("T")


@dataclass(frozen=True)
class PartSeconds:
    """Of a micro-batch, or of all.

    Attributes:
        forward: to the final hidden states, without gradient.
        logprob: log-prob and entropy of them, also without.
        top_k: what the dense top-k set adds to it.
        rates: the top-k estimate of the acceptance rate and its floor, the rollout's set copied from the host.
        exact: what the exact rate adds: the rollout's hidden states, gathered on the host, through the head.
        update: forward and backward of the log-probs.
    """

    forward: float
    logprob: float
    top_k: float
    rates: float
    exact: float
    update: float

    @property
    def score(self) -> float:
        """The dense pass without acceptance rates."""
        return self.forward + self.logprob + self.top_k


class MicroTimer:
    """Times micro-batches on one model, whose gradients add up."""

    def __init__(self, model: Decoder, attention: DenseBackend, chunk: int, top_k: int, device: torch.device) -> None:
        self.model, self.attention, self.device = model, attention, device
        self.chunk, self.top_k = chunk, top_k

    def measure(self, micro: MicroBatch) -> PartSeconds:
        """The second of two runs."""
        self._once(micro)
        return self._once(micro)

    def update(self, micro: MicroBatch) -> None:
        """Forward and backward of the mean log-prob."""
        (-self._logprobs(self._hidden(micro), micro)[0].mean()).backward()

    @torch.no_grad()
    def dense_pass(self, micro: MicroBatch) -> DenseScores:
        """On the device."""
        scores = self._scores(self._hidden(micro), micro, None)
        release(self.model)
        return scores

    def _once(self, micro: MicroBatch) -> PartSeconds:
        scoring = self._score(micro)
        release(self.model)
        _, update = self._timed(lambda: self.update(micro))
        return PartSeconds(*scoring, update)

    @torch.no_grad()
    def _score(self, micro: MicroBatch) -> tuple[float, float, float, float, float]:
        """Parts of the dense pass; the hidden states are made once for all."""
        hidden_NE, forward = self._timed(lambda: self._hidden(micro))
        sparse_NE = hidden_NE.cpu()
        _, logprob = self._timed(lambda: [x.cpu() for x in self._logprobs(hidden_NE, micro)])
        scores, scored = self._timed(lambda: self._scores(hidden_NE, micro, None))
        _, exactly = self._timed(lambda: self._scores(hidden_NE, micro, sparse_NE))
        theirs = [x.cpu() for x in (scores.top_ids_NK, scores.top_logprobs_NK)]
        _, rates = self._timed(lambda: _rates(scores, theirs))
        return forward, logprob, scored - logprob, rates, exactly - scored

    def _hidden(self, micro: MicroBatch) -> Tensor:
        return response_hidden(self.model, micro, DenseAttention(self.attention, micro.lengths, self.device))

    def _logprobs(self, hidden_NE: Tensor, micro: MicroBatch) -> tuple[Tensor, Tensor]:
        return token_logprobs(hidden_NE, self.model.summing_head(), micro.targets_N, 1.0, self.chunk)

    def _scores(self, hidden_NE: Tensor, micro: MicroBatch, rollout_NE: Tensor | None) -> DenseScores:
        """Log-probs, entropy and exact rates are copied to the host, where the recipe keeps them."""
        index_N = None if rollout_NE is None else torch.arange(len(rollout_NE))
        scores = score_tokens(
            hidden_NE, self.model.logits, micro.targets_N, 1.0, self.top_k, rollout_NE, self.chunk,
            sparse_index_N=index_N,
        )  # fmt: skip
        for kept in (scores.logprobs_N, scores.entropy_N, scores.alpha_exact_N):
            if kept is not None:
                kept.cpu()
        return scores

    def _timed(self, work: Callable[[], T]) -> tuple[T, float]:
        return timed_once(work, self.device)


def time_optimizer(model: Decoder, optimizer: Optimizer, device: torch.device) -> float:
    """Clips and steps twice, on gradients that are there; the first step makes the state."""

    def step() -> None:
        clip_gradients(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()

    step()
    _, seconds = timed_once(step, device)
    optimizer.zero_grad(set_to_none=True)
    return seconds


def time_summary(batch: RolloutBatch, estimator: str, top_k: int) -> float:
    """Quantiles and bins of all tokens of the step, on the CPU; the rates are drawn."""
    acceptance = AcceptanceTail(estimator, top_k)
    rates_T, other_T = torch.rand(2, batch.num_tokens)
    beside_T = None if estimator == "top_k" else other_T
    logprobs_T = -4 * other_T

    def summarise() -> None:
        places = (batch.cached_length_T, logprobs_T, logprobs_T - 0.1 * rates_T, beside_T, batch.response_position_T)
        acceptance.summary(TailTokens(rates_T, other_T, *places))

    _, seconds = timed_once(summarise, torch.device("cpu"))
    return seconds


def timed_once(work: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """What it returns, and its seconds with the device waited for."""
    _wait(device)
    started = time.perf_counter()
    result = work()
    _wait(device)
    return result, time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _rates(scores: DenseScores, theirs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The set against itself: what it costs does not depend on what is in it."""
    ids_NK, logprobs_NK = scores.top_ids_NK, scores.top_logprobs_NK
    at = torch.arange(len(ids_NK))
    their_ids_NK, their_logprobs_NK = (x[at].to(ids_NK.device) for x in theirs)
    return alpha_top_k(their_ids_NK, their_logprobs_NK, ids_NK, logprobs_NK).cpu(), top_k_floor(logprobs_NK).cpu()
