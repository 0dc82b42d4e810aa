"""The optimizer steps that one batch of rollouts is split into, and what is logged of them together.

Axes: S sequences of this rank's batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparrow.components.aggregation import BatchTotals
from sparrow.recipes.grpo_config import GRPOConfig
from sparrow.rollout import RolloutBatch
from sparrow.training import distributed
from sparrow.training.balance import balance
from sparrow.training.packing import MicroBatch, empty_micro_batch, pack, split_by_tokens


@dataclass(frozen=True)
class Minibatch:
    """One optimizer step, as far as this rank takes part.

    Attributes:
        micro_batches: its sequences that teach something, packed; as many on each rank, the last ones may be empty.
        learning_tokens: response tokens of these sequences over all ranks; with 0 there is no step to take.
        totals: denominators of the loss over all ranks. Sequences without an advantage count in them, unless the
            advantage says otherwise, although their gradient is zero.
    """

    micro_batches: list[MicroBatch]
    learning_tokens: int
    totals: BatchTotals


def balance_ranks(batch: RolloutBatch, cfg: GRPOConfig) -> RolloutBatch:
    """The batch after sequences moved to where fewer tokens are, in each minibatch and among those only scored."""
    return balance(batch, _part(batch, cfg) * 2 + _learns(batch, cfg))


def split_minibatches(
    batch: RolloutBatch, cfg: GRPOConfig, device: torch.device
) -> tuple[list[Minibatch], list[MicroBatch]]:
    """Deals whole groups out to `cfg.minibatches` optimizer steps.

    Returns:
        The minibatches, and micro-batches of the sequences that teach nothing: these are scored, for the acceptance
        tail, but go through no update. With a KL term all that count teach, since the reference pulls on each.
    """
    assert batch.keep_S is not None
    learns_S, part_S = _learns(batch, cfg), _part(batch, cfg)
    minibatches = [
        Minibatch(
            packed(batch, learns_S & (part_S == part), cfg.micro_batch_tokens, device),
            *_counts(batch, learns_S & (part_S == part), batch.keep_S & (part_S == part)),
        )
        for part in range(cfg.minibatches)
    ]
    return minibatches, packed(batch, ~learns_S, cfg.micro_batch_tokens, device)


def _learns(batch: RolloutBatch, cfg: GRPOConfig) -> Tensor:
    assert batch.advantages_S is not None and batch.keep_S is not None
    return batch.keep_S & ((batch.advantages_S != 0) | (cfg.kl_coef > 0))


def _part(batch: RolloutBatch, cfg: GRPOConfig) -> Tensor:
    return batch.numbers_S % cfg.minibatches  # the same split whatever the number of ranks


def combine_metrics(minibatches: Sequence[dict[str, float]]) -> dict[str, float]:
    """`update/skipped` added up, everything else averaged over the minibatches; one that is not finite shows."""
    values: dict[str, list[float]] = {}
    for metrics in minibatches:
        for name, value in metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(v) if name == "update/skipped" else sum(v) / len(v) for name, v in values.items()}


def packed(batch: RolloutBatch, chosen_S: Tensor, max_tokens: int, device: torch.device) -> list[MicroBatch]:
    """Micro-batches of the chosen sequences, as many on each rank; collective."""
    members = chosen_S.nonzero().flatten().tolist()
    lengths = [len(batch.prompts[s]) + int(batch.lengths_S[s]) - 1 for s in members]
    batches = [pack(batch, [members[i] for i in group], device) for group in split_by_tokens(lengths, max_tokens)]
    # Each forward and backward is a collective of all ranks.
    missing = max(distributed.gather_objects(len(batches))) - len(batches)
    return batches + [empty_micro_batch(device)] * missing


def _counts(batch: RolloutBatch, learning_S: Tensor, counted_S: Tensor) -> tuple[int, BatchTotals]:
    """Learning tokens and denominators, over all ranks."""
    sums = distributed.sum_values(
        {
            "learning": float(batch.lengths_S[learning_S].sum()),
            "tokens": float(batch.lengths_S[counted_S].sum()),
            "sequences": float(counted_S.sum()),
        }
    )
    # Without a learning sequence they may be 0, and are not used.
    return int(sums["learning"]), BatchTotals(max(int(sums["tokens"]), 1), max(int(sums["sequences"]), 1))
