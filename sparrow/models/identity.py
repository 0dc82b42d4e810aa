"""What tells one checkpoint from another, without loading it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from sparrow.errors import UserError
from sparrow.models.decoder_config import read_config, read_json

SAVED_AS = "model"  # the folder of every warm-up and save: as a name it says nothing
_SLICES, _SLICE_BYTES = 64, 4096
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_SCALE = ("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora")


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
    """An adapter of peft by the name of its folder and `adapter_fingerprint`."""
    return f"{folder.absolute().name}, weights {adapter_fingerprint(folder)}"


def adapter_fingerprint(folder: Path) -> str:
    """A hash of an adapter's weights and of the settings that scale their products; UserError where there is none."""
    lacking = [name for name in (_CONFIG, _WEIGHTS) if not (folder / name).is_file()]
    if lacking:
        raise UserError(f"adapter: {folder} holds no {' and no '.join(lacking)}: it is no folder of peft")
    settings = read_json(folder / _CONFIG)
    scale = json.dumps([settings.get(key) for key in _SCALE], sort_keys=True)
    return hashlib.sha256(f"{fingerprint(folder)} {scale}".encode()).hexdigest()[:16]
