"""What tells checkpoints apart: their figures, and a hash of slices of their weights."""

from __future__ import annotations

from pathlib import Path

import torch

from sparrow.models.checkpoint import save_decoder
from sparrow.models.decoder import Decoder
from sparrow.models.decoder_config import DecoderConfig
from sparrow.models.identity import architecture, fingerprint


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
