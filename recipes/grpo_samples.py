"""Some rollouts of a step, as rows for the trackers: what the model wrote, and where sparse and dense disagreed.

Axes: S sequences, T response tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from sparrow.models.tokenizer import Tokenizer
from sparrow.rollout import RolloutBatch
from sparrow.tracking.samples import shorten

TOKENS_EACH_END = 1024
LOWEST, CONTEXT_TOKENS = 8, 8
CHARACTERS = 4000
NOT_MEASURED = -1


def sample_rows(batch: RolloutBatch, tokenizer: Tokenizer, count: int) -> list[dict[str, Any]]:
    """The first samples of the step, one of each group in turn; docs/tracking.md lists the keys of a row."""
    order = torch.argsort(batch.samples_S, stable=True)[:count].tolist()
    return [_row(batch, tokenizer, s) for s in order]


def _row(batch: RolloutBatch, tokenizer: Tokenizer, s: int) -> dict[str, Any]:
    assert batch.rewards_S is not None and batch.advantages_S is not None and batch.alpha_T is not None
    alphas = batch.alpha_T[batch.slice_of(s)]
    ids = batch.tokens_T[batch.slice_of(s)].tolist()
    shown = _ends(list(range(len(ids))))
    return {
        "prompt": shorten(tokenizer.decode(batch.prompts[s]), CHARACTERS),
        "response": shorten(batch.texts[s], CHARACTERS),
        "reward": float(batch.rewards_S[s]),
        "rewards": batch.reward_parts[s],
        "advantage": float(batch.advantages_S[s]),
        "length": len(ids),
        "terminated": bool(batch.terminated_S[s]),
        "alpha_mean": float(alphas.mean()),
        "alpha_min": float(alphas.min()),
        "tokens": [tokenizer.decode([ids[at]]) for at in shown],
        "alphas": [_thousandths(float(alphas[at])) for at in shown],
        "omitted": len(ids) - len(shown),
        "lowest": [_marked(tokenizer, ids, at, float(alphas[at])) for at in _lowest(alphas)],
    }


def _ends(positions: list[int]) -> list[int]:
    """All, or of a long response its first and last."""
    if len(positions) <= 2 * TOKENS_EACH_END:
        return positions
    return positions[:TOKENS_EACH_END] + positions[-TOKENS_EACH_END:]


def _lowest(alphas: torch.Tensor) -> list[int]:
    """Positions of the tokens that were least likely to be accepted, in the order of the response."""
    measured = torch.where(alphas.isfinite(), alphas, torch.inf)
    lowest = torch.argsort(measured, stable=True)[:LOWEST]
    return sorted(at for at in lowest.tolist() if measured[at] < 1)


def _marked(tokenizer: Tokenizer, ids: list[int], at: int, alpha: float) -> dict[str, Any]:
    return {
        "position": at,
        "alpha": round(alpha, 4),
        "before": tokenizer.decode(ids[max(0, at - CONTEXT_TOKENS) : at]),
        "token": tokenizer.decode([ids[at]]),
        "after": tokenizer.decode(ids[at + 1 : at + 1 + CONTEXT_TOKENS]),
    }


def _thousandths(alpha: float) -> int:
    return round(1000 * alpha) if alpha == alpha else NOT_MEASURED
