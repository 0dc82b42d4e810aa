"""The decoder as the rollout runs it on a GPU: packed weights in the rollout's dtype, fused kernels, no gradients.

The same network as `sparrow.models.decoder`, rounded at the same places. q, k and v are one matrix, gate and up
another, in buffers of their own that `load` fills.

Axes: T packed tokens, E hidden size, H query heads, K KV heads, D head dim, X = (H + 2 K) * D, I intermediate size,
C shares of a projection, N any selection of tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from sparrow.kernels.add_norm import add_norm
from sparrow.kernels.linear import linear, swiglu
from sparrow.kernels.options import LinearOptionsTable, row_tiles
from sparrow.models.adapted import effective_weight
from sparrow.models.decoder import Decoder, DecoderLayer, rotary_factors, rotate
from sparrow.models.decoder_config import DecoderConfig
from sparrow.protocols import Attention, HeadParameters, ProjectionAttention
from sparrow.training.sharding import gathered


@dataclass(frozen=True)
class PackedLayer:
    """Weights of one layer."""

    qkv_XE: Tensor
    heads: HeadParameters
    output_EX: Tensor
    gate_up_2IE: Tensor
    down_EI: Tensor
    input_gain_E: Tensor
    mlp_gain_E: Tensor


class RolloutDecoder:
    """Runs on CUDA; weights are zero until `load`.

    Args:
        dtype: of weights, activations and KV cache.
    """

    def __init__(self, config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.embedding_VE = self._zeros(config.vocab_size, config.hidden_size)
        tied = config.tie_word_embeddings
        self.head_VE = self.embedding_VE if tied else torch.zeros_like(self.embedding_VE)
        self.final_gain_E = self._zeros(config.hidden_size)
        self.layers = [self._layer() for _ in range(config.num_layers)]
        self.no_shares = self._zeros(0, 1, config.hidden_size)
        self.options = LinearOptionsTable(device, dtype)
        positions = torch.arange(config.max_position_embeddings, device=device)
        cos, sin = rotary_factors(positions, config.head_dim, config.rope_theta, dtype)
        # Per position, so that a decode step looks them up: [positions, D / 2], the sine without `rotate`'s sign.
        half = config.head_dim // 2
        self.cos_PD, self.sin_PD = cos[:, 0, :half].contiguous(), sin[:, 0, half:].contiguous()

    @torch.no_grad()
    def load(self, model: Decoder) -> None:
        """Copies the model's weights, with the deltas of adapters that are active; collective where it is sharded."""
        with gathered(model):
            self.embedding_VE.copy_(model.model.embed_tokens.weight)
            if model.lm_head is not None:
                self.head_VE.copy_(model.lm_head.weight)
            self.final_gain_E.copy_(model.model.norm.weight)
        for packed, layer in zip(self.layers, model.model.layers, strict=True):
            assert isinstance(layer, DecoderLayer)
            with gathered(layer):
                _load_layer(packed, layer)

    @torch.no_grad()
    def tune(self, num_rows: int) -> None:
        """Measures the projections' launch options for batches of up to this many rows, where no table knows them."""
        for rows in row_tiles(num_rows):
            for attribute in ("qkv_XE", "output_EX", "gate_up_2IE", "down_EI"):
                weights = [getattr(layer, attribute) for layer in self.layers]
                self.options.tune(weights, rows, gated=attribute == "gate_up_2IE")
            self.options.tune([self.head_VE], rows, gated=False)

    def __call__(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
        """Final hidden states [T, E], after the last norm; see `Decoder.forward`."""
        residual_TE = F.embedding(tokens_T, self.embedding_VE)
        x_TE = add_norm(residual_TE, self.no_shares, self.layers[0].input_gain_E, self.config.rms_norm_eps)
        gains = [layer.input_gain_E for layer in self.layers[1:]] + [self.final_gain_E]
        cos_TD, sin_TD = self.cos_PD[positions_T], self.sin_PD[positions_T]
        for index, (layer, next_gain_E) in enumerate(zip(self.layers, gains, strict=True)):
            out_TX = self._attend(index, layer, x_TE, cos_TD, sin_TD, attention)
            x_TE = self._add_norm(residual_TE, self._linear(out_TX, layer.output_EX), layer.mlp_gain_E)
            gated = self.options.get(len(x_TE), layer.gate_up_2IE, gated=True)
            h_TI = swiglu(x_TE, layer.gate_up_2IE, gated)
            x_TE = self._add_norm(residual_TE, self._linear(h_TI, layer.down_EI), next_gain_E)
        return x_TE

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Logits [N, V] in fp32: products of the rollout's dtype, summed in fp32 and never rounded to it."""
        options = self.options.get(len(hidden_NE), self.head_VE, gated=False)
        if options is not None and options.shares > 1:
            options = None  # the shares would be summed by nobody
        return linear(hidden_NE, self.head_VE, options, torch.float32)[0]

    def _attend(
        self, index: int, layer: PackedLayer, x_TE: Tensor, cos_TD: Tensor, sin_TD: Tensor, attention: Attention
    ) -> Tensor:
        """[T, H * D]."""
        qkv_CTX = self._project(x_TE, layer)
        if isinstance(attention, ProjectionAttention):
            return attention.project(index, qkv_CTX, layer.heads, cos_TD, sin_TD)
        q_THD, k_TKD, v_TKD = self._heads(qkv_CTX, layer.heads, cos_TD, sin_TD)
        return attention(index, q_THD, k_TKD, v_TKD).flatten(1)

    def _project(self, x_TE: Tensor, layer: PackedLayer) -> Tensor:
        """[C, T, X], unrounded where a bias is still to be added: the trainer's F.linear rounds their sum, once."""
        options = self.options.get(len(x_TE), layer.qkv_XE, gated=False)
        return linear(x_TE, layer.qkv_XE, options, None if layer.heads.bias_X is None else torch.float32)

    def _heads(
        self, qkv_CTX: Tensor, heads: HeadParameters, cos_TD: Tensor, sin_TD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        qkv_TX = qkv_CTX[0] if len(qkv_CTX) == 1 else qkv_CTX.sum(0)
        if heads.bias_X is not None:
            qkv_TX = qkv_TX + heads.bias_X
        by_head = qkv_TX.to(self.dtype).unflatten(1, (-1, config.head_dim))
        q, k, v = by_head.split((config.num_heads, config.num_kv_heads, config.num_kv_heads), dim=1)
        if heads.gains is not None:
            shape = (config.head_dim,)
            q, k = (
                F.rms_norm(x.float(), shape, eps=heads.eps).to(x.dtype) * gain
                for x, gain in zip((q, k), heads.gains, strict=True)
            )
        cos = torch.cat((cos_TD, cos_TD), -1)[:, None]
        sin = torch.cat((-sin_TD, sin_TD), -1)[:, None]
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _linear(self, x_TK: Tensor, weight: Tensor) -> Tensor:
        return linear(x_TK, weight, self.options.get(len(x_TK), weight, gated=False))

    def _add_norm(self, residual_TE: Tensor, shares_CTE: Tensor, gain_E: Tensor) -> Tensor:
        return add_norm(residual_TE, shares_CTE, gain_E, self.config.rms_norm_eps)

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, device=self.device, dtype=self.dtype)

    def _layer(self) -> PackedLayer:
        config = self.config
        E, D, size = config.hidden_size, config.head_dim, config.intermediate_size
        width = (config.num_heads + 2 * config.num_kv_heads) * D
        gains = (self._zeros(D), self._zeros(D)) if config.qk_norm else None
        heads = HeadParameters(self._zeros(width) if config.qkv_bias else None, gains, config.rms_norm_eps)
        return PackedLayer(
            self._zeros(width, E), heads, self._zeros(E, config.num_heads * D), self._zeros(2 * size, E),
            self._zeros(E, size), self._zeros(E), self._zeros(E),
        )  # fmt: skip


def _load_layer(packed: PackedLayer, layer: DecoderLayer) -> None:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    _copy_rows(packed.qkv_XE, [effective_weight(module) for module in projections])
    if packed.heads.bias_X is not None:
        _copy_rows(packed.heads.bias_X, [module.bias for module in projections])
    if packed.heads.gains is not None:
        assert attention.q_norm is not None and attention.k_norm is not None
        packed.heads.gains[0].copy_(attention.q_norm.weight)
        packed.heads.gains[1].copy_(attention.k_norm.weight)
    packed.output_EX.copy_(effective_weight(attention.o_proj))
    _copy_rows(packed.gate_up_2IE, [effective_weight(mlp.gate_proj), effective_weight(mlp.up_proj)])
    packed.down_EI.copy_(effective_weight(mlp.down_proj))
    packed.input_gain_E.copy_(layer.input_layernorm.weight)
    packed.mlp_gain_E.copy_(layer.post_attention_layernorm.weight)


def _copy_rows(target: Tensor, sources: list[Tensor]) -> None:
    for part, source in zip(target.split([len(source) for source in sources]), sources, strict=True):
        part.copy_(source)
