"""What tells one checkpoint from another, without loading it."""

from __future__ import annotations

import hashlib
from pathlib import Path

from sparrow.errors import UserError
from sparrow.models.decoder_config import read_config

SAVED_AS = "model"  # the folder of every warm-up and save: as a name it says nothing
_SLICES, _SLICE_BYTES = 64, 4096


def architecture(folder: Path) -> str | None:
    """The figures of config.json that training never changes; None where there is no checkpoint yet."""
    if not (folder / "config.json").is_file():
        return None
    config = read_config(folder)
    return (
        f"{config.model_type}, {config.num_layers} layers of {config.hidden_size}, "
        f"{config.num_heads} query and {config.num_kv_heads} KV heads of {config.head_dim}, "
        f"MLP {config.intermediate_size}, vocabulary {config.vocab_size}"
    )


def fingerprint(folder: Path) -> str | None:
    """A hash of slices of the weights: another after any training, and read in no time; None without weights."""
    files = sorted(folder.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with file.open("rb") as handle:
            for number in range(_SLICES):
                handle.seek(max(size - _SLICE_BYTES, 0) * number // (_SLICES - 1))
                digest.update(handle.read(_SLICE_BYTES))
    return digest.hexdigest()[:16] if files else None


def adapter_identity(folder: Path) -> str:
    """An adapter of peft by the name of its folder and a hash of its weights."""
    weights = fingerprint(folder)
    if weights is None:
        raise UserError(f"adapter: {folder} holds no adapter_model.safetensors: it is no folder of peft")
    return f"{folder.absolute().name}, weights {weights}"
