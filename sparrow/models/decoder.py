"""One decoder for Qwen3, Qwen2.5 and Llama, over a flat packed token axis.

Parameter names are Hugging Face's, so checkpoints and PEFT adapters need no renaming. How tokens see each other is
the caller's business: `attention` is called once per layer with q, k and v (after q/k-norm and RoPE), so that one
forward serves packed training documents, prefill, and decoding with one token per row.

Axes: T packed tokens, E hidden size, H query heads, K KV heads, D head dim, N any selection of tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparrow.models.decoder_config import DecoderConfig
from sparrow.models.head import SummingHead, fp32_logits
from sparrow.protocols import Attention


@dataclass(frozen=True, kw_only=True)
class InitOptions:
    """How the weights of a fresh model are drawn; the defaults are Hugging Face's.

    Attributes:
        std: standard deviation of every matrix but those named below; biases start at zero, norms at one.
        embedding_std: standard deviation of the token embedding (and of the head when it is tied).
        qk_norm_gain: start of the q- and k-norm gains; above 1 attention starts sharper.
        zero_output_projections: start o_proj and down_proj at zero, so that every layer starts as the identity.
    """

    std: float = 0.02
    embedding_std: float = 0.02
    qk_norm_gain: float = 1.0
    zero_output_projections: bool = False


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, in fp32; cast before the gain, as Hugging Face does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, eps=self.eps).to(x.dtype) * self.weight


def rotary_factors(positions_T: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sign-folded sine of the rotary embedding, each [T, 1, D] in `dtype`, computed in fp32.

    The sine's first half is negated, which turns Hugging Face's `rotate_half` into a roll (see `rotate`).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_T.device) / head_dim
    angles = positions_T[:, None, None].float() * (1.0 / theta**exponents)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), dim=-1).to(dtype), torch.cat((-sin, sin), dim=-1).to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Applies the rotary embedding to [T, heads, D], pairing dimension i with i + D/2 (Hugging Face's layout)."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


class SelfAttention(nn.Module):
    """Projections, q/k-norm and RoPE; attention itself is the caller's."""

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        hidden, head_dim = config.hidden_size, config.head_dim
        self.layer = layer
        self.head_dim = head_dim
        self.q_proj = nn.Linear(hidden, config.num_heads * head_dim, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * head_dim, bias=config.qkv_bias)
        self.o_proj = nn.Linear(config.num_heads * head_dim, hidden, bias=False)
        # One gain per head dimension, shared by the heads, applied *before* RoPE (Qwen3 report, section 2).
        self.q_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(head_dim, config.rms_norm_eps) if config.qk_norm else None

    def project(self, hidden_TE: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, D], keys and values [T, K, D]."""
        per_head = (hidden_TE.shape[0], -1, self.head_dim)
        q_THD = self.q_proj(hidden_TE).view(per_head)
        k_TKD = self.k_proj(hidden_TE).view(per_head)
        v_TKD = self.v_proj(hidden_TE).view(per_head)
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TKD = self.q_norm(q_THD), self.k_norm(k_TKD)
        return rotate(q_THD, cos, sin), rotate(k_TKD, cos, sin), v_TKD


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden_TE: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden_TE)) * self.up_proj(hidden_TE))


class DecoderLayer(nn.Module):
    """Pre-norm attention and MLP, each with a residual connection.

    The two halves around attention are methods: `sparrow.training.layers` recomputes and compiles them one by one.
    """

    def __init__(self, config: DecoderConfig, layer: int) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config, layer)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden_TE: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        q_THD, k_TKD, v_TKD = self.before_attention(hidden_TE, cos, sin)
        return self.after_attention(hidden_TE, attention(self.self_attn.layer, q_THD, k_TKD, v_TKD))

    def before_attention(self, hidden_TE: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(self.input_layernorm(hidden_TE), cos, sin)

    def after_attention(self, hidden_TE: Tensor, out_THD: Tensor) -> Tensor:
        hidden_TE = hidden_TE + self.self_attn.o_proj(out_THD.flatten(1))
        return hidden_TE + self.mlp(self.post_attention_layernorm(hidden_TE))


class DecoderStack(nn.Module):
    """Embedding, layers and final norm: what Hugging Face keeps under the prefix `model.`."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.rope_theta = config.rope_theta
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, layer) for layer in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
        hidden_TE = self.embed_tokens(tokens_T)
        cos, sin = rotary_factors(positions_T, self.head_dim, self.rope_theta, hidden_TE.dtype)
        for layer in self.layers:
            hidden_TE = layer(hidden_TE, cos, sin, attention)
        return self.norm(hidden_TE)


class Decoder(nn.Module):
    """A causal language model whose parameter names equal those of Hugging Face's `*ForCausalLM`.

    With `config.tie_word_embeddings` there is no `lm_head`: the embedding is the head, and stands once among the
    parameters. The weights of a new `Decoder` are arbitrary until `init_weights` or a checkpoint sets them.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DecoderStack(config)
        self.lm_head = (
            None if config.tie_word_embeddings else nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        )

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attention: Attention) -> Tensor:
        """Final hidden states [T, E], after the last norm; `logits` turns those that are needed into logits.

        Args:
            tokens_T: token ids, int64 [T], of any number of documents or decode rows one after the other.
            positions_T: position of each token within its own document, from 0, int64 [T].
            attention: called with (layer, q [T, H, D], k [T, K, D], v [T, K, D]); returns [T, H, D].
        """
        return self.model(tokens_T, positions_T, attention)

    @property
    def head_weight(self) -> Tensor:
        """The matrix [V, E] that turns hidden states into logits; the embedding where the head is tied."""
        return self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight

    def logits(self, hidden_NE: Tensor, vocab: slice | None = None) -> Tensor:
        """Logits in fp32, whatever the model's dtype, for final hidden states [N, E]: [N, V], or a slice of V."""
        # Not slice(None): its backward would hold a second gradient of the whole matrix.
        weight_VE = self.head_weight if vocab is None else self.head_weight[vocab]
        return fp32_logits(hidden_NE, weight_VE)

    def summing_head(self) -> SummingHead:
        """`logits` for the chunks of one forward and backward, whose gradients of the head are added up in fp32."""
        return SummingHead(self.head_weight)

    @torch.no_grad()
    def init_weights(self, seed: int, options: InitOptions = InitOptions()) -> None:
        """Draws fresh weights in place, in a fixed order from `seed`, on the CPU: the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            parameter.copy_(_initial_value(name, parameter.shape, options, generator))


def _initial_value(name: str, shape: torch.Size, options: InitOptions, generator: torch.Generator) -> Tensor:
    module, _, kind = name.rpartition(".")
    if kind == "bias":
        return torch.zeros(shape)
    if module.endswith(("q_norm", "k_norm")):
        return torch.full(shape, options.qk_norm_gain)
    if module.endswith("norm"):
        return torch.ones(shape)
    if options.zero_output_projections and module.endswith(("o_proj", "down_proj")):
        return torch.zeros(shape)
    std = options.embedding_std if module.endswith("embed_tokens") else options.std
    return torch.empty(shape).normal_(0.0, std, generator=generator)
