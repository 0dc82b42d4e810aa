"""Models and caches of the engine's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sparrow.components.budget import StepSchedule
from sparrow.components.kv_cache import DenseKVCache, SparseKVCache
from sparrow.components.selector import HeadSoftmaxSelector
from sparrow.engine.engine import Engine, EngineConfig
from sparrow.models.decoder import Decoder, InitOptions
from sparrow.models.decoder_config import DecoderConfig

CONFIG = DecoderConfig(
    vocab_size=23, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8,
    max_position_embeddings=512,
)  # fmt: skip


def drawn(decoder: Decoder) -> Decoder:
    decoder.init_weights(0, InitOptions(std=0.2, embedding_std=0.1))
    return decoder.eval()


@pytest.fixture(scope="session")
def model() -> Decoder:
    return drawn(Decoder(CONFIG))


class RowwiseLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (x[..., None, :] * self.weight).sum(-1)


class RowwiseDecoder(Decoder):
    """Rounds a row alike whatever stands beside it; matrix products take other kernels for few rows than for many."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.__class__ = RowwiseLinear

    def logits(self, hidden_NE: Tensor) -> Tensor:
        return (hidden_NE[:, None] * self.head_weight).sum(-1)


@pytest.fixture(scope="session")
def exact_model() -> Decoder:
    """For equality in every bit; with pages of 16, since SDPA sums in vectors of up to 16, and a prompt a pass."""
    return drawn(RowwiseDecoder(CONFIG))


@pytest.fixture
def cache() -> Callable[[str], DenseKVCache | SparseKVCache]:
    def build(kind: str) -> DenseKVCache | SparseKVCache:
        """Pages and blocks of 16."""
        if kind == "dense":
            return DenseKVCache(16, 16)
        return SparseKVCache(StepSchedule(pages=[3, 4], bin_width=60), HeadSoftmaxSelector(), 16, 16, dense_layers=1)

    return build


@pytest.fixture
def make() -> Callable[..., Engine]:
    def build(model, cache, eos=(0, 22), rows=12, kv_tokens=2048, limit=40, prefill=16384, steps=None, decode=None):
        config = EngineConfig(
            max_rows=rows, kv_tokens=kv_tokens, max_new_tokens=limit, prefill_tokens=prefill, steps_per_look=steps
        )
        return Engine(model, cache, eos, config, seed=3, top_k=5, decode=decode)

    return build


OUTPUTS = ("lengths_S", "tokens_T", "logprobs_T", "top_ids_TK", "top_logprobs_TK", "hidden_TE", "terminated_S")


@pytest.fixture
def assert_equal() -> Callable[..., None]:
    def compare(one, other) -> None:
        """Two batches, bit for bit."""
        for name in OUTPUTS:
            assert torch.equal(getattr(one, name), getattr(other, name)), name

    return compare
