"""Model FLOPs of the training half: what the mathematics of a step needs, recomputation not counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sparrow.cost import matmul_weights
from sparrow.models.decoder_config import DecoderConfig
from sparrow.training.packing import MicroBatch

UPDATE_FORWARDS = 3  # a forward, and a backward of two products for each of its products


def forward_flop(config: DecoderConfig, lengths: Sequence[int], scored: int) -> float:
    """One forward over packed documents, causal, with the head for `scored` of their tokens.

    Two for every weight and token; for every query, key and layer four times heads x head_dim.

    Args:
        lengths: tokens of each document.
    """
    head = config.vocab_size * config.hidden_size
    linear = 2 * (matmul_weights(config) - head) * sum(lengths) + 2 * head * scored
    pairs = sum(length * (length + 1) / 2 for length in lengths)
    return linear + 4 * config.num_layers * config.num_heads * config.head_dim * pairs


def training_flop(
    config: DecoderConfig, scored: Iterable[MicroBatch], learned: Iterable[MicroBatch], forwards: int
) -> float:
    """`forwards` passes over what is scored, and forward and backward of what is learned from."""
    return forwards * _forwards(config, scored) + UPDATE_FORWARDS * _forwards(config, learned)


def _forwards(config: DecoderConfig, micro_batches: Iterable[MicroBatch]) -> float:
    return sum(forward_flop(config, micro.lengths, len(micro.targets_N)) for micro in micro_batches)
