"""The shape of a decoder, and its translation from and to a Hugging Face config.json (Qwen3, Qwen2.5, Llama)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparrow.errors import UserError

_ARCHITECTURES = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
# What transformers assumes where a config.json leaves the key out.
_DEFAULT_CONTEXT = {"qwen3": 32_768, "qwen2": 32_768, "llama": 2_048}
_DEFAULT_QWEN3_HEAD_DIM = 128
_DEFAULT_ROPE_THETA = 10_000.0


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of a `Decoder`; the defaults are those of Qwen3.

    `qk_norm` makes it a Qwen3, `qkv_bias` a Qwen2.5, neither a Llama; no supported architecture has both.

    Raises:
        UserError: a size is not a positive integer, or two values do not fit together.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    qkv_bias: bool = False
    qk_norm: bool = True
    max_position_embeddings: int = 32_768

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (type(value) is not int or value < 1):
                raise UserError(f"{field.name} must be a positive integer, not {value!r}")
            if field.type == "float" and (type(value) not in (int, float) or not value > 0):
                raise UserError(f"{field.name} must be a positive number, not {value!r}")
        if self.num_heads % self.num_kv_heads:
            raise UserError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise UserError(f"head_dim must be even for rotary embeddings, not {self.head_dim}")
        if self.qkv_bias and self.qk_norm:
            raise UserError("qkv_bias and qk_norm cannot both be true: Qwen3 has qk_norm, Qwen2.5 has qkv_bias")
        if self.model_type == "llama" and self.hidden_size % self.num_heads:
            raise UserError(
                f"a Llama's hidden_size {self.hidden_size} must be a multiple of num_heads {self.num_heads}"
            )

    @property
    def model_type(self) -> str:
        """Hugging Face's name of the architecture."""
        if self.qk_norm:
            return "qwen3"
        return "qwen2" if self.qkv_bias else "llama"


def read_config(folder: Path) -> DecoderConfig:
    """Reads `config.json` of a Hugging Face folder; transformers 4 and 5 spellings.

    Raises:
        UserError: no such file, not JSON, a missing key, or a feature this decoder lacks (file and key are named).
    """
    file = folder / "config.json"
    raw = read_json(file)
    model_type = raw.get("model_type")
    if model_type not in _ARCHITECTURES:
        raise UserError(f"{file}: model_type {model_type!r} is not supported; supported: {', '.join(_ARCHITECTURES)}")
    for key, reason in _unsupported_features(raw):
        raise UserError(f"{file}: {key}: {raw[key]!r}: {reason}")
    try:
        return _from_huggingface(raw, model_type)
    except KeyError as error:
        raise UserError(f"{file}: the key {error} is missing") from None
    except (UserError, TypeError) as error:
        raise UserError(f"{file}: {error}") from None


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file; UserError where there is none."""
    if not file.is_file():
        raise UserError(f"{file} does not exist; a model is a Hugging Face folder with config.json and safetensors")
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{file} holds a {type(content).__name__}, not a JSON object")
    return content


def to_huggingface(config: DecoderConfig, dtype: torch.dtype, token_ids: dict[str, Any]) -> dict[str, Any]:
    """The content of a config.json that transformers 4 and 5 both load (the older spelling, which both read).

    Args:
        dtype: the dtype of the saved weights.
        token_ids: bos_token_id, eos_token_id and pad_token_id; those left out are written as null, because
            transformers would otherwise fill in ids of its own.
    """
    return {
        "architectures": [_ARCHITECTURES[config.model_type]],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "tie_word_embeddings": config.tie_word_embeddings,
        "torch_dtype": str(dtype).removeprefix("torch."),
        **{key: token_ids.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    }


def _from_huggingface(raw: dict[str, Any], model_type: str) -> DecoderConfig:
    num_heads = raw["num_attention_heads"]
    head_dim = raw.get("head_dim")
    if head_dim is None:
        head_dim = _DEFAULT_QWEN3_HEAD_DIM if model_type == "qwen3" else raw["hidden_size"] // num_heads
    rope_theta = _rope(raw).get("rope_theta") or raw.get("rope_theta") or _DEFAULT_ROPE_THETA
    return DecoderConfig(
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=raw.get("num_key_value_heads") or num_heads,
        head_dim=head_dim,
        rope_theta=rope_theta,
        rms_norm_eps=raw.get("rms_norm_eps", 1e-6),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=model_type == "qwen2",
        qk_norm=model_type == "qwen3",
        max_position_embeddings=raw.get("max_position_embeddings", _DEFAULT_CONTEXT[model_type]),
    )


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """RoPE settings under whichever name they have: `rope_parameters` (transformers 5) or `rope_scaling` (4)."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _unsupported_features(raw: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys of a config.json that would change the forward pass in a way this decoder does not compute."""
    if raw.get("quantization_config"):
        yield "quantization_config", "quantized checkpoints are not supported; use the full-precision weights"
    if raw.get("hidden_act", "silu") != "silu":
        yield "hidden_act", "only silu is supported"
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            yield key, "biases are supported on q, k and v of model_type qwen2 only"
    if _scales_rope(_rope(raw)):
        yield "rope_parameters" if raw.get("rope_parameters") else "rope_scaling", "scaled RoPE is not supported"
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        yield "partial_rotary_factor", "partial RoPE is not supported"
    if "sliding_attention" in (raw.get("layer_types") or []):
        yield "layer_types", "sliding-window attention is not supported"
    elif _slides(raw):
        yield "use_sliding_window", "sliding-window attention is not supported"


def _scales_rope(rope: dict[str, Any]) -> bool:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    nested = any(isinstance(value, dict) for value in rope.values())
    return nested or kind != "default" or rope.get("partial_rotary_factor", 1.0) != 1.0


def _slides(raw: dict[str, Any]) -> bool:
    """Whether some layer slides; `layer_types`, where it is given, decides instead."""
    if not raw.get("use_sliding_window") or raw.get("layer_types") or raw.get("sliding_window", 4096) is None:
        return False
    return bool(raw.get("max_window_layers", 28) < raw["num_hidden_layers"])
