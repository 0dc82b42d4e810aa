"""Adapters of peft merged into a decoder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparrow.attention.packed import PackedCausal
from sparrow.components.distiller import LoRADistiller
from sparrow.errors import UserError
from sparrow.models.adapted import adapters_on, copy_weights
from sparrow.models.decoder import Decoder
from sparrow.models.decoder_config import DecoderConfig
from sparrow.models.merge import attach_adapter, merge_adapter

SHAPE = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 8, "rope_theta": 10000.0, "max_position_embeddings": 64,
}  # fmt: skip


def decoder(**changed: int) -> Decoder:
    model = Decoder(DecoderConfig(**{**SHAPE, **changed}))
    model.init_weights(0)
    return model


@pytest.fixture
def adapter(tmp_path: Path) -> tuple[Path, Decoder]:
    """A folder as the distiller exports it, and the model with its deltas."""
    model, merged = decoder(), decoder()
    distiller = LoRADistiller(learning_rate=0.1, rank=3, alpha=6, targets=["q_proj", "down_proj"])
    distiller.attach(model)
    torch.manual_seed(1)
    for parameter in distiller.adapter.values():
        torch.nn.init.normal_(parameter)
    distiller.export(tmp_path / "adapter")
    with distiller.rollout():
        copy_weights(merged, model)
    return tmp_path / "adapter", merged


def test_merged_weights_are_those_of_the_adapted_model(adapter):
    folder, expected = adapter
    model = decoder()
    merge_adapter(model, folder)
    plain = decoder().state_dict()
    assert list(model.state_dict()) == list(plain), "plain names again"
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict()[name])
        adapted = "q_proj" in name or "down_proj" in name
        assert torch.equal(tensor, plain[name]) != adapted, name


def test_by_hand_with_scale(adapter):
    folder, _ = adapter
    model = decoder()
    merge_adapter(model, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    path = "model.layers.1.self_attn.q_proj"
    a, b = (tensors[f"base_model.model.{path}.lora_{x}.weight"] for x in "AB")
    plain = decoder().state_dict()[f"{path}.weight"]
    torch.testing.assert_close(model.state_dict()[f"{path}.weight"], plain + 6 / 3 * b @ a)


def test_bf16_weights_are_rounded_once(adapter):
    folder, expected = adapter
    model = decoder().to(torch.bfloat16)
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    merge_adapter(model, folder)
    path = "model.layers.0.mlp.down_proj.weight"
    delta = expected.state_dict()[path] - decoder().state_dict()[path]
    assert model.state_dict()[path].dtype == torch.bfloat16
    torch.testing.assert_close(model.state_dict()[path], (plain[path].float() + delta).bfloat16(), rtol=1e-2, atol=1e-3)


def edit(file: Path, **changed: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


UNSUPPORTED = {
    "use_dora": True,
    "modules_to_save": ["lm_head"],
    "bias": "all",
    "lora_bias": True,
    "layer_replication": [[0, 2], [0, 2]],
    "alora_invocation_tokens": [1, 2],
}


def test_what_cannot_be_merged(adapter, tmp_path):
    folder, _ = adapter
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    with pytest.raises(UserError, match=r"holds no adapter_config\.json"):
        merge_adapter(decoder(), tmp_path)
    with pytest.raises(UserError, match=r"does not fit the model: .*shape \[32, 3\], the model wants \[64, 3\]"):
        merge_adapter(decoder(hidden_size=64), folder)
    with pytest.raises(UserError, match=r"layers\.1\..* is no module of the model; and \d+ more"):
        merge_adapter(decoder(num_layers=1), folder)
    tensors, whole = load_file(weights), weights.read_bytes()
    save_file(dict(list(tensors.items())[1:]), weights)
    with pytest.raises(UserError, match="is missing"):
        merge_adapter(decoder(), folder)
    weights.write_bytes(b"junk")
    with pytest.raises(UserError, match=r"adapter_model\.safetensors cannot be read"):
        merge_adapter(decoder(), folder)
    weights.write_bytes(whole)
    for key, value in UNSUPPORTED.items():
        before = config.read_text()
        edit(config, **{key: value})
        with pytest.raises(UserError, match=f"{key}.* is not supported"):
            merge_adapter(decoder(), folder)
        config.write_text(before)
    merge_adapter(decoder(), folder)  # as it was, it can be
    edit(config, target_modules="query")
    with pytest.raises(UserError, match="does not fit the model"):
        merge_adapter(decoder(), folder)
    edit(config, target_modules=["q_proj", "query"])
    with pytest.raises(UserError, match=r"target_modules 'query', the model has down_proj, gate_proj, .*q_proj"):
        merge_adapter(decoder(), folder)
    edit(config, target_modules=None)
    with pytest.raises(UserError, match="has no target_modules"):
        merge_adapter(decoder(), folder)
    edit(config, target_modules=["q_proj"], r="three")
    with pytest.raises(UserError, match="does not fit the model"):
        merge_adapter(decoder(), folder)
    config.write_text("{")
    with pytest.raises(UserError, match=r"adapter_config\.json cannot be read"):
        merge_adapter(decoder(), folder)


def hidden(model: Decoder) -> torch.Tensor:
    tokens_T = torch.arange(12)
    with torch.no_grad():
        return model(tokens_T, tokens_T, PackedCausal([12]))


def test_attached_it_is_off_and_on_and_off(adapter):
    """Beside the weights on is what merged weights give, without the dropout of its training."""
    folder, merged = adapter
    edit(folder / "adapter_config.json", lora_dropout=0.5)
    model = decoder()
    layers = attach_adapter(model, folder)
    assert len(layers) == 4 and torch.equal(hidden(model), hidden(decoder()))
    with adapters_on(layers):
        torch.testing.assert_close(hidden(model), hidden(merged), rtol=1e-4, atol=1e-5)
    assert torch.equal(hidden(model), hidden(decoder()))


def test_only_layers_have_an_adapter_for_rollouts_alone(adapter):
    folder, _ = adapter
    model = decoder(tie_word_embeddings=False)
    from peft import LoraConfig, inject_adapter_in_model

    inject_adapter_in_model(config := LoraConfig(r=3, target_modules=["lm_head"]), model)
    config.save_pretrained(str(folder))
    tensors = {f"base_model.model.{n.replace('.default', '')}": p for n, p in model.named_parameters() if "lora_" in n}
    save_file({name: tensor.detach() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"adapts lm_head; only modules under model\.layers\.\*"):
        attach_adapter(decoder(tie_word_embeddings=False), folder)
