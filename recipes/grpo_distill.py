"""The distiller in a run: what it asks of the other components, its engine's weights, and a step of it.

Axes: S sequences of this rank's batch, T their response tokens.
"""

from __future__ import annotations

import torch

from sparrow.attention.dense import DenseAttention, DenseBackend
from sparrow.components.distiller import Distiller, DistillRun
from sparrow.engine.weights import MergedWeights, RolloutWeights
from sparrow.errors import UserError
from sparrow.models.decoder import Decoder
from sparrow.protocols import KVCache
from sparrow.recipes.grpo_minibatches import packed
from sparrow.rollout import RolloutBatch
from sparrow.training.sharding import is_sharded, release

TRAINED_ADAPTER = "the distiller's own"  # of no fixed weights, for the comparison with a schedule's


def check_recorded(distiller: Distiller | None, top_k: int) -> None:
    """UserError where the distiller's teacher wants more tokens than the dense pass keeps."""
    wanted = 0 if distiller is None else distiller.recorded_top_k
    if wanted > top_k:
        raise UserError(
            f"distiller.loss.top_k: {wanted}, and the teacher before_step has the acceptance.top_k {top_k} most "
            "probable tokens; raise that, or take distiller.teacher: current"
        )


def engine_weights(distiller: Distiller | None, model: Decoder) -> RolloutWeights | None:
    """What the engine is to run where `merge_in_engine` asks for another than it takes by itself.

    Raises:
        UserError: the adapter is to stay beside weights that the engine has a copy of.
    """
    if distiller is None or distiller.merge_in_engine is None:
        return None
    copied = is_sharded(model) or next(model.parameters()).is_cuda
    if copied and not distiller.merge_in_engine:
        raise UserError(
            "distiller.merge_in_engine: false: on CUDA, with several processes or dtype bfloat16 the engine runs a "
            "copy of the weights, into which the adapter is merged; leave it out"
        )
    return MergedWeights(model) if distiller.merge_in_engine and not copied else None


class DistillStep:
    """A step of the distiller on its share of a batch.

    Args:
        attention: of the dense forward, where the teacher is the current policy.
    """

    def __init__(
        self,
        distiller: Distiller,
        model: Decoder,
        attention: DenseBackend,
        temperature: float,
        micro_batch_tokens: int,
        chunk_size: int,
        device: torch.device,
    ) -> None:
        self.distiller, self.model, self.attention, self.temperature = distiller, model, attention, temperature
        self.micro_batch_tokens, self.chunk_size, self.device = micro_batch_tokens, chunk_size, device

    def __call__(self, batch: RolloutBatch, cache: KVCache, base_rate: float | None) -> dict[str, float]:
        """Metrics over all ranks; collective."""
        chosen_S = self.distiller.chosen(batch.numbers_S)
        micro_batches = packed(batch, chosen_S, self.micro_batch_tokens, self.device)
        run = DistillRun(
            attention=lambda micro: cache.training(micro.lengths, micro.prompt_lengths, self.device),
            dense_attention=lambda micro: DenseAttention(self.attention, micro.lengths, self.device),
            temperature=self.temperature,
            chunk_size=self.chunk_size,
            base_rate=base_rate,
        )
        metrics = self.distiller.step(batch, micro_batches, run)
        release(self.model)
        return metrics
