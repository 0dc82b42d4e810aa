"""Bytes of a decoder's parts, from its sizes alone: parameters, activations, optimizer state.

Widths: E hidden size, H query heads, K KV heads, D head dim, I intermediate size, V vocabulary, d bytes of an element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from sparrow.models.decoder_config import DecoderConfig

Activations = Literal["kept", "recomputed", "offloaded"]  # see `sparrow.training.layers.prepare_layers`

FP32 = 4
STATISTIC = 4  # bytes: norms and attention keep one fp32 figure a row


@dataclass(frozen=True)
class ParameterCounts:
    """Parameters of one layer, of all, and of what is no layer: embedding, head where it is untied, last norm."""

    layer: int
    root: int
    total: int


def parameter_counts(config: DecoderConfig) -> ParameterCounts:
    """Those of `sparrow.models.decoder.Decoder`."""
    E, D = config.hidden_size, config.head_dim
    width = (config.num_heads + 2 * config.num_kv_heads) * D
    layer = E * (width + config.num_heads * D) + 3 * E * config.intermediate_size + 2 * E
    layer += width if config.qkv_bias else 0
    layer += 2 * D if config.qk_norm else 0
    matrices = 1 if config.tie_word_embeddings else 2
    root = matrices * config.vocab_size * E + E
    return ParameterCounts(layer, root, root + config.num_layers * layer)


def attention_saved_bytes(config: DecoderConfig, dtype: torch.dtype, flex: bool) -> int:
    """What attention keeps of one token of one layer: queries, keys, values, output, and a figure for each row.

    SDPA keeps its padded output besides the packed one, and in fp32 keys and values are repeated for each query head,
    as `sparrow.attention.packed` must on CUDA.
    """
    d, D = dtype.itemsize, config.head_dim
    kv_heads = config.num_heads if dtype == torch.float32 and not flex else config.num_kv_heads
    outputs = 1 if flex else 2
    return ((1 + outputs) * config.num_heads + 2 * kv_heads) * D * d + config.num_heads * STATISTIC


def layer_saved_bytes(config: DecoderConfig, dtype: torch.dtype, flex: bool) -> int:
    """What one layer keeps of one token for its backward, as `DecoderLayer` computes."""
    return sum(_half_bytes(config, dtype)) + attention_saved_bytes(config, dtype, flex)


def _half_bytes(config: DecoderConfig, dtype: torch.dtype) -> tuple[int, int]:
    """What the halves before and after attention keep."""
    d, D = dtype.itemsize, config.head_dim
    heads = config.num_heads + config.num_kv_heads
    # The input in fp32, the normed one, and that times the gain.
    norm = config.hidden_size * (FP32 + 2 * d) + STATISTIC
    head_norms = heads * (D * (FP32 + d) + STATISTIC) if config.qk_norm else 0
    return norm + head_norms, norm + 4 * config.intermediate_size * d


def recomputed_bytes(config: DecoderConfig, dtype: torch.dtype, activations: Activations, flex: bool) -> int:
    """What of one token is made again at a time in the backward: half a layer, or all of it."""
    if activations == "kept":
        return 0
    if activations == "recomputed":
        return max(_half_bytes(config, dtype))
    return _input(config, dtype) + layer_saved_bytes(config, dtype, flex)


def layer_working_bytes(config: DecoderConfig, dtype: torch.dtype) -> int:
    """What one layer holds of one token while it computes, forward or backward: the wider of MLP and attention."""
    d, heads = dtype.itemsize, 2 * (config.num_heads + config.num_kv_heads)
    widest = max(3 * config.intermediate_size * d, heads * config.head_dim * (d + FP32))
    return widest + 2 * config.hidden_size * (d + FP32)


def saved_bytes(config: DecoderConfig, dtype: torch.dtype, activations: Activations, flex: bool) -> int:
    """What the whole model keeps on the device of one token between its forward and its backward."""
    layer = {
        "kept": layer_saved_bytes(config, dtype, flex),
        "recomputed": _input(config, dtype) + attention_saved_bytes(config, dtype, flex),
        "offloaded": 0,
    }[activations]
    return config.num_layers * layer + _ends(config, dtype)


def offloaded_bytes(config: DecoderConfig, dtype: torch.dtype, activations: Activations) -> int:
    """What waits in the host's memory meanwhile: each layer's input."""
    return config.num_layers * _input(config, dtype) if activations == "offloaded" else 0


def _input(config: DecoderConfig, dtype: torch.dtype) -> int:
    return config.hidden_size * dtype.itemsize


def _ends(config: DecoderConfig, dtype: torch.dtype) -> int:
    """The last norm, and what all layers share: token, position, cosine and sine."""
    ids = 2 * torch.int64.itemsize
    return config.hidden_size * (FP32 + dtype.itemsize) + STATISTIC + 2 * config.head_dim * dtype.itemsize + ids


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes of each parameter: state on the device, temporaries of its step, and what it holds on the host."""

    state: float
    step: float = 0.0
    host: float = 0.0


# A quantised state has one fp32 scale for each block.
_BLOCK_8BIT, _BLOCK_4BIT = 256, 128
_QUANTISED = {
    "8bit": 2 * (1 + FP32 / _BLOCK_8BIT),
    "Fp8": 2 * (1 + FP32 / _BLOCK_8BIT),
    "4bit": 2 * (0.5 + FP32 / _BLOCK_4BIT),
}


def optimizer_memory(path: str, arguments: Mapping[str, Any]) -> OptimizerMemory:
    """By the optimizer's name; one that is not known is taken for an AdamW in fp32.

    AdamW of torch makes one temporary of all parameters in its step, unless it is fused. Muon has one momentum for each
    matrix, and is counted as AdamW: its own copies of a matrix are short-lived.
    """
    name = path.rpartition(".")[2]
    if name == "OffloadedAdamW":
        return OptimizerMemory(0.0, host=4 * FP32)  # weights, gradients and both moments
    for suffix, state in _QUANTISED.items():
        if name.endswith(suffix):
            return OptimizerMemory(state)
    if name == "SGD":
        return OptimizerMemory(FP32 if arguments.get("momentum") else 0.0)
    moments = 3 if arguments.get("amsgrad") else 2
    return OptimizerMemory(moments * FP32, step=0.0 if arguments.get("fused") else FP32)
