"""What tells checkpoints apart: their figures, and a hash of slices of their weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparrow.errors import UserError
from sparrow.models.checkpoint import save_decoder
from sparrow.models.decoder import Decoder
from sparrow.models.decoder_config import DecoderConfig
from sparrow.models.identity import adapter_fingerprint, architecture, fingerprint


def saved(folder: Path, seed: int, num_layers: int = 2) -> Path:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_layers": num_layers}
    config = DecoderConfig(**sizes, num_heads=4, num_kv_heads=2, head_dim=8)
    torch.manual_seed(seed)
    save_decoder(Decoder(config), folder, None)
    return folder


def test_the_architecture_is_what_training_does_not_change(tmp_path: Path) -> None:
    first, second = saved(tmp_path / "a", 0), saved(tmp_path / "b", 1)
    figures = "qwen3, 2 layers of 32, 4 query and 2 KV heads of 8, MLP 64, vocabulary 64"
    assert architecture(first) == architecture(second) == figures
    assert architecture(saved(tmp_path / "c", 0, num_layers=3)) == figures.replace("2 layers", "3 layers")


def test_the_fingerprint_follows_the_weights(tmp_path: Path) -> None:
    first, same, other = (saved(tmp_path / name, seed) for name, seed in (("a", 0), ("b", 0), ("c", 1)))
    assert fingerprint(first) == fingerprint(same) != fingerprint(other)
    file = first / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    assert fingerprint(first) != fingerprint(same), "the last slice reaches the end"


def test_nothing_is_known_of_a_checkpoint_that_is_not_there(tmp_path: Path) -> None:
    assert architecture(tmp_path) is None and fingerprint(tmp_path) is None


def test_an_adapter_is_another_with_another_scale(tmp_path: Path) -> None:
    config = tmp_path / "adapter_config.json"
    save_file({"lora_A": torch.ones(2, 4)}, tmp_path / "adapter_model.safetensors")
    config.write_text('{"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "k_proj"]}')
    first = adapter_fingerprint(tmp_path)
    config.write_text('{"lora_alpha": 4, "target_modules": ["k_proj", "q_proj"], "r": 2}')  # a set, in any order
    assert adapter_fingerprint(tmp_path) == first
    for other in ('{"r": 2, "lora_alpha": 8}', '{"r": 2, "lora_alpha": 4, "use_rslora": true}'):
        config.write_text(other)
        assert adapter_fingerprint(tmp_path) != first, other


def test_what_is_no_adapter(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no adapter_config\.json and no adapter_model\.safetensors"):
        adapter_fingerprint(tmp_path)
    config = tmp_path / "adapter_config.json"
    config.write_text("{")
    with pytest.raises(UserError, match=r"holds no adapter_model\.safetensors"):
        adapter_fingerprint(tmp_path)
    save_file({"lora_A": torch.ones(2, 4)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match=r"adapter_config\.json is not valid JSON"):
        adapter_fingerprint(tmp_path)
