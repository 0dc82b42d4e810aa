"""Whose weights the rollout runs: the trainer's own, or a copy in the rollout's dtype that a sync refreshes.

Axes: T probe tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from sparrow.attention.packed import PackedCausal
from sparrow.engine.decode import RolloutModel
from sparrow.models.adapted import copy_weights
from sparrow.models.decoder import Decoder
from sparrow.training.sharding import release

PROBE_TOKENS = 64
PROBE_STRIDE = 7919  # a prime: the probe walks over the whole vocabulary

# Mean difference of the probe's log-probs that rounding explains. Swapped or stale matrices are off by nats.
PROBE_TOLERANCE = {torch.float32: 0.01, torch.float16: 0.1, torch.bfloat16: 0.25}


class RolloutWeights(Protocol):
    """Where the engine gets its model from."""

    def wake(self) -> RolloutModel:
        """The model with the trainer's weights of now."""
        ...

    def sleep(self) -> None:
        """Gives back what `wake` allocated."""
        ...


class SharedWeights:
    """The trainer's own model, or any other that is kept up to date elsewhere: nothing is copied."""

    probe_difference = 0.0

    def __init__(self, model: RolloutModel) -> None:
        self.model = model

    def wake(self) -> RolloutModel:
        """The model."""
        return self.model

    def sleep(self) -> None:
        """Nothing to give back."""


class CopiedWeights:
    """A plain copy of a sharded model, whose forward needs all ranks while each decodes at its own pace.

    Filled at every `wake`, which is collective.
    """

    probe_difference = 0.0

    def __init__(self, model: Decoder, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self.device, self.dtype = model, device, dtype

    def wake(self) -> RolloutModel:
        """A fresh copy, adapters that are active included."""
        with torch.device("meta"):
            decoder = Decoder(self.model.config).to(self.dtype)
        decoder.to_empty(device=self.device)
        copy_weights(decoder, self.model)
        return decoder

    def sleep(self) -> None:
        """The engine drops the only reference to the copy; there is nothing else."""


class PackedWeights:
    """A `RolloutDecoder`, filled from the trainer's model at every `wake` and checked against it by a probe.

    Args:
        dtype: of the copy.
        max_rows: largest batch, for which launch options are measured if `tune`.

    Attributes:
        probe_difference: mean difference of the probe's log-probs between copy and model, at the last `wake`.
    """

    def __init__(self, model: Decoder, device: torch.device, dtype: torch.dtype, max_rows: int, tune: bool) -> None:
        self.model, self.device, self.dtype, self.max_rows, self.tune = model, device, dtype, max_rows, tune
        self.probe_difference = 0.0

    def wake(self) -> RolloutModel:
        """A fresh copy of the weights, adapters that are active included.

        Raises:
            RuntimeError: the copy says something else than the model.
        """
        from sparrow.models.rollout_decoder import RolloutDecoder  # Triton is not installed where there is no GPU

        decoder = RolloutDecoder(self.model.config, self.device, self.dtype)
        decoder.load(self.model)
        self.probe_difference = self._probe(decoder)
        if not self.probe_difference <= PROBE_TOLERANCE[self.dtype]:  # a NaN fails too
            raise RuntimeError(
                f"engine: after the sync, log-probs of the rollout's weights differ from the trainer's by "
                f"{self.probe_difference:.3g} nats in the mean; {self.dtype} explains {PROBE_TOLERANCE[self.dtype]}"
            )
        if self.tune:
            decoder.tune(self.max_rows)
        return decoder

    def sleep(self) -> None:
        """The engine drops the only reference to the copy; there is nothing else."""

    def _probe(self, decoder: RolloutModel) -> float:
        vocab_size = self.model.config.vocab_size
        length = min(PROBE_TOKENS, self.model.config.max_position_embeddings)
        tokens_T = torch.arange(length, device=self.device) * PROBE_STRIDE % vocab_size
        ours, trainers = _logprobs(decoder, tokens_T), _logprobs(self.model, tokens_T)
        release(self.model)
        return float((ours - trainers).abs().mean())


def _logprobs(model: RolloutModel, tokens_T: Tensor) -> Tensor:
    """Log-probs of each token after those before it, [T - 1]."""
    positions_T = torch.arange(len(tokens_T), device=tokens_T.device)
    hidden_TE = model(tokens_T, positions_T, PackedCausal([len(tokens_T)], tokens_T.device))
    logprobs_TV = model.logits(hidden_TE[:-1]).log_softmax(-1)
    return logprobs_TV.gather(1, tokens_T[1:, None])[:, 0]
