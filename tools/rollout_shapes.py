"""Shapes that the rollout benchmark knows: the Qwen3 family, and caches by a short name.

Only shapes: weights are random, and lengths are forced, so no checkpoint is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sparrow.components.budget import FixedBudget, StepSchedule
from sparrow.components.kv_cache import DenseKVCache, SparseKVCache
from sparrow.components.selector import (
    CentroidSelector,
    HeadMaxSelector,
    HeadSoftmaxSelector,
    QuestSelector,
    SegmentSoftmaxSelector,
)
from sparrow.engine.decode import RolloutModel
from sparrow.errors import UserError
from sparrow.models.decoder import Decoder
from sparrow.models.decoder_config import DecoderConfig
from sparrow.protocols import KVCache

if TYPE_CHECKING:
    from sparrow.models.rollout_decoder import RolloutDecoder  # needs Triton

# hidden, intermediate, layers, heads, tied head
QWEN3 = {
    "0.6b": (1024, 3072, 28, 16, True),
    "1.7b": (2048, 6144, 28, 16, True),
    "4b": (2560, 9728, 36, 32, True),
    "8b": (4096, 12288, 36, 32, False),
    "14b": (5120, 17408, 40, 40, False),
}
# To try the tools on a CPU: a decoder of a second's work.
TINY = DecoderConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=16,
    max_position_embeddings=40960,
)  # fmt: skip
MODELS = (*QWEN3, "tiny")
SELECTORS = {
    "centroid": CentroidSelector,
    "head_softmax": HeadSoftmaxSelector,
    "head_max": HeadMaxSelector,
    "quest": QuestSelector,
    "segments": SegmentSoftmaxSelector,  # 4 a page
}
BACKENDS = ("triton", "flex", "gather")


@dataclass(frozen=True)
class RandomModel:
    """A model of random weights: a `RolloutDecoder` in bf16 on CUDA, the trainer's `Decoder` in fp32 on the CPU."""

    name: str
    config: DecoderConfig
    decoder: RolloutModel
    device: torch.device
    dtype: torch.dtype


def model_config(name: str) -> DecoderConfig:
    """The published shape of a Qwen3 model, or the tiny one."""
    if name == "tiny":
        return TINY
    hidden, intermediate, layers, heads, tied = QWEN3[name]
    return DecoderConfig(
        vocab_size=151936, hidden_size=hidden, intermediate_size=intermediate, num_layers=layers, num_heads=heads,
        num_kv_heads=8, head_dim=128, rope_theta=1e6, rms_norm_eps=1e-6, tie_word_embeddings=tied, qk_norm=True,
        max_position_embeddings=40960,
    )  # fmt: skip


def kv_cache(spec: str, selector: str, backend: str) -> KVCache:
    """`dense`, a number of tokens that sparse layers may read, or the name of a schedule."""
    if spec == "dense":
        return DenseKVCache(backend=backend)  # type: ignore[arg-type]
    try:
        budget = FixedBudget(int(spec) // 16) if spec.isdigit() else StepSchedule(spec, allow_foreign=True)
        return SparseKVCache(budget, SELECTORS[selector](), backend=backend)  # type: ignore[arg-type]
    except UserError as error:
        raise UserError(f"--cache {spec}: `dense`, tokens per sparse layer, or a schedule; {error}") from None


def random_model(name: str, device: torch.device) -> RandomModel:
    """Weights drawn on the device, at the scale of a trained model's."""
    config = model_config(name)
    if device.type == "cuda":
        decoder = random_decoder(config, device, torch.bfloat16)
        return RandomModel(name, config, decoder, device, torch.bfloat16)
    trainers = Decoder(config)
    trainers.init_weights(0)
    return RandomModel(name, config, trainers.eval(), device, torch.float32)


def random_decoder(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> RolloutDecoder:
    """The same as a `RolloutDecoder`, on CUDA."""
    from sparrow.models.rollout_decoder import RolloutDecoder

    decoder = RolloutDecoder(config, device, dtype)
    generator = torch.Generator(device).manual_seed(0)
    for layer in decoder.layers:
        for matrix in (layer.qkv_XE, layer.output_EX, layer.gate_up_2IE, layer.down_EI):
            matrix.normal_(0, matrix.shape[1] ** -0.5, generator=generator)
        gains = (layer.input_gain_E, layer.mlp_gain_E, *(layer.heads.gains or ()))
        for gain in gains:
            gain.fill_(1)
    decoder.final_gain_E.fill_(1)
    decoder.embedding_VE.normal_(0, 0.02, generator=generator)
    if decoder.head_VE is not decoder.embedding_VE:
        decoder.head_VE.normal_(0, 0.02, generator=generator)
    return decoder


def tune(model: RandomModel, max_rows: int) -> None:
    """Launch options for batches of up to `max_rows`; the trainer's decoder has none."""
    if not isinstance(model.decoder, Decoder):
        model.decoder.tune(max_rows)  # type: ignore[attr-defined]


def fill_with_noise(cache: KVCache, generator: torch.Generator) -> None:
    """Random keys, values and landmarks in the whole pool: zeros would tie all pages, and selection pick neighbours."""
    pool = cache.pool  # type: ignore[attr-defined]
    for tensor in (*pool.keys_KSD, *pool.values_KSD, *pool.landmarks_KPMD.values()):
        tensor.normal_(generator=generator)


def step_bytes(model: RandomModel, cache: KVCache, lengths: Sequence[int]) -> int:
    """Bytes that a decode step must read at these cached lengths: the weights once, and what each row selects."""
    return weight_bytes(model.config, model.dtype) + kv_bytes(model.config, cache, torch.tensor(lengths), model.dtype)


def weight_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """All but the embedding table where the head is another matrix, and the norms' gains."""
    width = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    per_layer = config.hidden_size * (width + config.num_heads * config.head_dim + 3 * config.intermediate_size)
    return (config.num_layers * per_layer + config.vocab_size * config.hidden_size) * dtype.itemsize


def kv_bytes(config: DecoderConfig, cache: KVCache, lengths_B: torch.Tensor, dtype: torch.dtype) -> int:
    """Keys, values and landmarks."""
    entries = float(cache.tokens_read(lengths_B, config.num_layers).double().sum())
    return int(entries * 2 * config.num_kv_heads * config.head_dim * dtype.itemsize)
