from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from sparrow.errors import UserError
from sparrow.models.decoder import Decoder, InitOptions, RMSNorm, rotary_factors, rotate
from sparrow.models.decoder_config import DecoderConfig

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SMALL = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
}


def twin(reference) -> Decoder:
    """Our decoder with the shape and the weights of a model of transformers."""
    hf = reference.config
    config = DecoderConfig(
        vocab_size=hf.vocab_size,
        hidden_size=hf.hidden_size,
        intermediate_size=hf.intermediate_size,
        num_layers=hf.num_hidden_layers,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=hf.head_dim,
        rope_theta=hf.rope_parameters["rope_theta"],
        rms_norm_eps=hf.rms_norm_eps,
        tie_word_embeddings=hf.tie_word_embeddings,
        qkv_bias=hf.model_type == "qwen2",
        qk_norm=hf.model_type == "qwen3",
    )
    model = Decoder(config)
    model.load_state_dict({name: tensor.detach().clone() for name, tensor in reference.named_parameters()})
    return model


def tokens(count: int, seed: int = 0, vocab_size: int = 61) -> Tensor:
    return torch.randint(vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (8, 2), (10, 2)])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama"])
def test_logits_equal_those_of_transformers(huggingface_model, packed_attention, model_type, tied, heads):
    reference = huggingface_model(
        model_type, tie_word_embeddings=tied, num_attention_heads=heads[0], num_key_value_heads=heads[1]
    )
    model, tokens_T = twin(reference), tokens(50)
    with torch.no_grad():
        ours = model.logits(model(tokens_T, torch.arange(50), packed_attention([50])))
        theirs = reference(tokens_T[None]).logits[0]
    assert theirs.std() > 0.1
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama"])
def test_gradients_equal_those_of_transformers(huggingface_model, packed_attention, model_type):
    reference = huggingface_model(model_type, tie_word_embeddings=True)
    model, tokens_T = twin(reference), tokens(20)
    weights_TV = torch.randn(20, 61, generator=torch.Generator().manual_seed(1))
    (model.logits(model(tokens_T, torch.arange(20), packed_attention([20]))) * weights_TV).sum().backward()
    (reference(tokens_T[None]).logits[0] * weights_TV).sum().backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-3, rtol=1e-4, msg=name)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama"])
def test_packed_documents_do_not_see_each_other(huggingface_model, packed_attention, model_type):
    model = twin(huggingface_model(model_type))
    first, second = tokens(7, seed=1), tokens(12, seed=2)
    with torch.no_grad():
        alone = [model(t, torch.arange(len(t)), packed_attention([len(t)])) for t in (first, second)]
        positions_T = torch.cat([torch.arange(7), torch.arange(12)])
        packed = model(torch.cat([first, second]), positions_T, packed_attention([7, 12]))
    torch.testing.assert_close(packed, torch.cat(alone), atol=1e-5, rtol=1e-5)


def test_each_layer_calls_the_attention_once_with_normed_and_rotated_heads():
    model = Decoder(DecoderConfig(**SMALL, qk_norm=True))
    model.init_weights(0, InitOptions(std=1.0, qk_norm_gain=1.5))
    calls = []

    def attention(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        calls.append((layer, q_THD.shape, k_TKD.shape, v_TKD.shape))
        # Rotation keeps the length, so the norm's gain alone decides it: root mean square 1.5.
        torch.testing.assert_close(k_TKD.pow(2).mean(-1).sqrt(), torch.full((5, 2), 1.5))
        return q_THD

    model(tokens(5, vocab_size=31), torch.arange(5), attention)
    assert calls == [(layer, (5, 4, 8), (5, 2, 8), (5, 2, 8)) for layer in range(2)]


@given(position=st.integers(0, 2_000), half=st.integers(1, 8), seed=st.integers(0, 99))
def test_rotation_is_a_complex_multiplication(position, half, seed):
    x_THD = torch.randn(1, 3, 2 * half, generator=torch.Generator().manual_seed(seed))
    cos, sin = rotary_factors(torch.tensor([position]), 2 * half, 1e4, torch.float32)
    angles = position / 1e4 ** (torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(*x_THD.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat([turned.real, turned.imag], dim=-1)
    torch.testing.assert_close(rotate(x_THD, cos, sin).double(), expected, atol=1e-3, rtol=0)


@settings(max_examples=20, deadline=None)
@given(shift=st.integers(1, 500))
def test_only_relative_positions_matter(packed_attention_of_nine, shift):
    model = Decoder(DecoderConfig(**SMALL))
    model.init_weights(0, InitOptions(std=0.2))
    tokens_T = tokens(9, vocab_size=31)
    with torch.no_grad():
        here = model(tokens_T, torch.arange(9), packed_attention_of_nine)
        there = model(tokens_T, torch.arange(9) + shift, packed_attention_of_nine)
    torch.testing.assert_close(here, there, atol=1e-3, rtol=0)


@pytest.fixture(scope="module")
def packed_attention_of_nine():
    def attention(layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        k_THD, v_THD = k_TKD.repeat_interleave(2, dim=1), v_TKD.repeat_interleave(2, dim=1)
        scores_HTT = torch.einsum("thd,shd->hts", q_THD, k_THD).masked_fill(torch.ones(9, 9).triu(1).bool(), -1e9)
        return torch.einsum("hts,shd->thd", scores_HTT.softmax(-1), v_THD)

    return attention


def test_rms_norm_rounds_like_transformers_in_bfloat16():
    x = torch.randn(400, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    ours, theirs = RMSNorm(64, 1e-6).bfloat16(), Qwen3RMSNorm(64, 1e-6).bfloat16()
    gain = torch.randn(64, generator=torch.Generator().manual_seed(1)).bfloat16()
    ours.weight.data, theirs.weight.data = gain, gain
    assert ours(x).dtype == torch.bfloat16
    assert (ours(x) == theirs(x)).float().mean() > 0.999


def test_logits_of_a_bfloat16_model_are_fp32_and_exact():
    model = Decoder(DecoderConfig(**SMALL, tie_word_embeddings=False)).bfloat16()
    hidden_NE = torch.randn(6, 16).bfloat16()
    logits_NV = model.logits(hidden_NE)
    assert logits_NV.dtype == torch.float32
    expected = hidden_NE.double() @ model.lm_head.weight.double().T
    torch.testing.assert_close(logits_NV.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_one_parameter(tied):
    names = [name for name, _ in Decoder(DecoderConfig(**SMALL, tie_word_embeddings=tied)).named_parameters()]
    assert ("lm_head.weight" in names) is not tied
    assert "model.embed_tokens.weight" in names


def test_fresh_weights_follow_the_options():
    wide = SMALL | {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 128}
    model = Decoder(DecoderConfig(**wide))
    model.init_weights(3, InitOptions(std=0.05, embedding_std=0.1, qk_norm_gain=1.5, zero_output_projections=True))
    state = model.state_dict()
    layer = "model.layers.1."
    assert state["model.embed_tokens.weight"].std().item() == pytest.approx(0.1, rel=0.05)
    assert state[layer + "mlp.gate_proj.weight"].std().item() == pytest.approx(0.05, rel=0.05)
    assert torch.all(state[layer + "self_attn.q_norm.weight"] == 1.5)
    assert torch.all(state[layer + "self_attn.k_norm.weight"] == 1.5)
    assert torch.all(state[layer + "input_layernorm.weight"] == 1.0)
    assert not state[layer + "self_attn.o_proj.weight"].any() and not state[layer + "mlp.down_proj.weight"].any()


def test_default_options_are_those_of_hugging_face():
    model = Decoder(DecoderConfig(**SMALL | {"hidden_size": 128}, qk_norm=False, qkv_bias=True))
    model.init_weights(0)
    for name, tensor in model.state_dict().items():
        if name.endswith("bias"):
            assert not tensor.any(), name
        elif "norm" in name:
            assert torch.all(tensor == 1.0), name
        else:
            assert tensor.std().item() == pytest.approx(0.02, rel=0.1), name


def test_fresh_weights_depend_on_the_seed_alone():
    config = DecoderConfig(**SMALL)
    weights = []
    for seed in (5, 5, 6):
        torch.manual_seed(len(weights))
        model = Decoder(config)
        model.init_weights(seed)
        weights.append(torch.cat([parameter.flatten() for parameter in model.parameters()]))
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_lora_wraps_every_projection(packed_attention):
    model = Decoder(DecoderConfig(**SMALL))
    model.init_weights(0, InitOptions(std=0.2))
    tokens_T, positions_T, attention = tokens(6, vocab_size=31), torch.arange(6), packed_attention([6])
    before = model(tokens_T, positions_T, attention).detach()
    model = inject_adapter_in_model(LoraConfig(r=2, lora_alpha=4, target_modules=LORA_TARGETS), model)
    after = model(tokens_T, positions_T, attention)
    torch.testing.assert_close(after, before)
    after.sum().backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    expected = {name for name, _ in model.named_parameters() if ".lora_" in name}
    assert trained == expected
    assert len(expected) == 2 * len(LORA_TARGETS) * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"num_layers": 0}, "num_layers must be a positive integer, not 0"),
        ({"hidden_size": "16"}, "hidden_size must be a positive integer, not '16'"),
        ({"rope_theta": float("nan")}, "rope_theta must be a positive number, not nan"),
        ({"qkv_bias": True, "qk_norm": True}, "cannot both be true"),
        ({"qk_norm": False, "hidden_size": 18}, "a Llama's hidden_size 18 must be a multiple"),
    ],
)
def test_impossible_shapes_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        DecoderConfig(**(SMALL | change))
