"""How token losses become one loss: a weight per token, so that loss = sum_t weight_t * loss_t.

The denominators are those of the optimizer step's whole batch, over all micro-batches and ranks. The sum of all
micro-batches' losses therefore does not depend on how the batch was split, and neither does its gradient.

Axes: S sequences and T tokens of one micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.errors import UserError

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@dataclass(frozen=True)
class BatchTotals:
    """Denominators of one optimizer step, over all its micro-batches and ranks.

    Sequences that `GroupAdvantage(zero_variance="drop")` dropped are counted in neither.
    """

    tokens: int
    sequences: int


class Aggregation:
    """Token weights for verl's four modes (`loss_agg_mode`), with N sequences in the step and |y| tokens in one.

    | mode | weight | used by |
    |---|---|---|
    | token-mean | 1 / tokens | DAPO (arXiv 2503.14476, 3.3), CISPO, Sparrow (arXiv 2606.08446) |
    | seq-mean-token-mean | 1 / (N * abs(y)) | GRPO (arXiv 2402.03300), GSPO (arXiv 2507.18071) |
    | seq-mean-token-sum | 1 / N | the plain policy gradient |
    | seq-mean-token-sum-norm | 1 / (N * max_length) | Dr. GRPO (arXiv 2503.20783, 3.2) |

    Args:
        mode: one of the above.
        max_length: the constant of seq-mean-token-sum-norm, normally the longest response allowed; read by it alone.

    Raises:
        UserError: unknown mode, or seq-mean-token-sum-norm without a positive max_length.
    """

    def __init__(self, mode: str, max_length: int | None = None) -> None:
        if mode not in MODES:
            raise UserError(f"mode {mode!r} is not an aggregation: choose one of {', '.join(MODES)}")
        if mode == "seq-mean-token-sum-norm" and (max_length is None or max_length < 1):
            raise UserError(f"mode {mode!r} divides by max_length, which is {max_length}: give the longest response")
        self.mode = mode
        self.max_length = max_length

    def weights(self, lengths_S: Tensor, sequence_T: Tensor, totals: BatchTotals) -> Tensor:
        """Weights [T], fp32, of the tokens of one micro-batch.

        Gradients of ranks must be summed, not averaged: under data parallelism that averages, multiply by the world
        size.

        Args:
            lengths_S: tokens of each sequence of the micro-batch; sequences are not split over micro-batches.
            sequence_T: index into `lengths_S` of each token's sequence.
            totals: denominators of the whole step.
        """
        assert totals.tokens > 0 and totals.sequences > 0, "a step without tokens has no loss"
        if self.mode == "token-mean":
            denominators_T = torch.full_like(sequence_T, totals.tokens)
        elif self.mode == "seq-mean-token-mean":
            denominators_T = totals.sequences * lengths_S[sequence_T]
        elif self.mode == "seq-mean-token-sum":
            denominators_T = torch.full_like(sequence_T, totals.sequences)
        else:
            assert self.max_length is not None
            denominators_T = torch.full_like(sequence_T, totals.sequences * self.max_length)
        return denominators_T.float().reciprocal()
