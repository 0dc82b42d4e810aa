"""Whose weights the rollout runs: the trainer's own, or a copy in the rollout's dtype that a sync refreshes.

Axes: T probe tokens, V vocabulary.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from sparrow.attention.packed import PackedCausal
from sparrow.engine.decode import RolloutModel
from sparrow.models.adapted import copy_weights, effective_weight
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


class MergedWeights:
    """The trainer's own model with its active adapters added to the weights, from `wake` to `sleep`.

    The trainer's tensors are set aside, not added to: what comes back is them, to the last bit.

    Attributes:
        probe_difference: mean difference of the probe's log-probs by the merge, at the last `wake`.
    """

    def __init__(self, model: Decoder) -> None:
        self.model, self.probe_difference = model, 0.0
        self._aside: list[tuple[Any, Tensor]] = []

    @torch.no_grad()
    def wake(self) -> RolloutModel:
        """The model, merged.

        Raises:
            RuntimeError: merged it is another model.
        """
        parameter = next(self.model.parameters())
        tokens_T = _probe_tokens(self.model, parameter.device)
        before = _logprobs(self.model, tokens_T)
        self._merge()
        self.probe_difference = float((_logprobs(self.model, tokens_T) - before).abs().mean())
        if not self.probe_difference <= PROBE_TOLERANCE[parameter.dtype]:  # a NaN fails too
            self.sleep()
            raise RuntimeError(
                f"engine: with the adapter merged, log-probs differ by {self.probe_difference:.3g} nats in the mean; "
                f"{parameter.dtype} explains {PROBE_TOLERANCE[parameter.dtype]}"
            )
        return self.model

    def sleep(self) -> None:
        """Puts the trainer's tensors back."""
        for layer, weight in self._aside:
            layer.base_layer.weight.data = weight
            layer.merged_adapters.clear()
        self._aside = []

    def _merge(self) -> None:
        for module in self.model.modules():
            layer: Any = module
            if not hasattr(layer, "base_layer") or layer.disable_adapters:
                continue
            own = layer.base_layer.weight
            merged = effective_weight(layer).to(own.dtype)
            self._aside.append((layer, own.data))
            own.data = merged
            layer.merged_adapters.extend(layer.active_adapters)  # peft then leaves the adapter out of the forward


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
        tokens_T = _probe_tokens(self.model, self.device)
        ours, trainers = _logprobs(decoder, tokens_T), _logprobs(self.model, tokens_T)
        release(self.model)
        return float((ours - trainers).abs().mean())


def _probe_tokens(model: Decoder, device: torch.device) -> Tensor:
    length = min(PROBE_TOKENS, model.config.max_position_embeddings)
    return torch.arange(length, device=device) * PROBE_STRIDE % model.config.vocab_size


def _logprobs(model: RolloutModel, tokens_T: Tensor) -> Tensor:
    """Log-probs of each token after those before it, [T - 1]."""
    positions_T = torch.arange(len(tokens_T), device=tokens_T.device)
    hidden_TE = model(tokens_T, positions_T, PackedCausal([len(tokens_T)], tokens_T.device))
    logprobs_TV = model.logits(hidden_TE[:-1]).log_softmax(-1)
    return logprobs_TV.gather(1, tokens_T[1:, None])[:, 0]
