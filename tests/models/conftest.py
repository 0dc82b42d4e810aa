"""Random tiny models of transformers and a plain packed attention, shared by the tests of the models."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config, Qwen3Config

_CONFIG_CLASSES = {"qwen3": Qwen3Config, "qwen2": Qwen2Config, "llama": LlamaConfig}


class PackedCausalAttention:
    """Causal attention within each document of a packed axis."""

    def __init__(self, lengths: list[int]) -> None:
        document_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        order_T = torch.arange(sum(lengths))
        self.visible_TT = (document_T[:, None] == document_T) & (order_T[:, None] >= order_T)

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        q, k, v = (x.transpose(0, 1)[None] for x in (q_THD, k_TKD, v_TKD))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.visible_TT, enable_gqa=True)[0].transpose(0, 1)


def _huggingface_model(model_type: str, **overrides: object) -> PreTrainedModel:
    shape: dict[str, object] = {
        "vocab_size": 61,
        "hidden_size": 40,
        "intermediate_size": 72,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 12,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5_000.0,
        "tie_word_embeddings": False,
    }
    model = AutoModelForCausalLM.from_config(_CONFIG_CLASSES[model_type](**(shape | overrides)), dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        # Norms away from one and biases away from zero: at their defaults they could be forgotten unnoticed.
        centre, spread = (1.0 if "norm" in name else 0.0), (0.3 if parameter.ndim == 1 else 0.15)
        torch.nn.init.normal_(parameter, centre, spread, generator=generator)
    return model.eval()


@pytest.fixture
def huggingface_model() -> Callable[..., PreTrainedModel]:
    """Factory (model_type, **config overrides) of random fp32 models."""
    return _huggingface_model


@pytest.fixture
def packed_attention() -> type[PackedCausalAttention]:
    """Attention from the list of document lengths."""
    return PackedCausalAttention
