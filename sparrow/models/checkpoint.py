"""Loading and saving decoders as ordinary Hugging Face folders (config.json, safetensors, tokenizer files)."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sparrow.errors import UserError
from sparrow.models.decoder import Decoder
from sparrow.models.decoder_config import DecoderConfig, read_config, read_json, to_huggingface

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_SHARDS = "model-*-of-*.safetensors"
_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
MAX_SHARD_BYTES = 5_000_000_000  # Hugging Face's own limit for years
_FLOAT_TYPES = ("F64", "F32", "F16", "BF16")
_SHOWN_PROBLEMS = 4


@dataclass(frozen=True)
class _StoredTensor:
    """Where a tensor stands, from the header of its file alone."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


def load_decoder(
    path: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    shard: Callable[[Decoder], None] | None = None,
    copy_share: Callable[[Tensor, Tensor], None] | None = None,
) -> Decoder:
    """Loads a Qwen3, Qwen2.5 or Llama checkpoint, one tensor at a time.

    Every file's header is checked before the first tensor is read. Beside the weights, one tensor of the file is in
    memory at a time.

    Args:
        path: Hugging Face folder with config.json and model.safetensors, single or sharded with its index.
        device: where the weights go.
        dtype: what the weights are converted to.
        shard: shards the model's parameters before any has memory; then `copy_share` writes each tensor's share.

    Raises:
        UserError: an unsupported model, or a missing, truncated or foreign file; says file, key and tensors.
    """
    folder = Path(path)
    config = read_config(folder)
    with torch.device("meta"):
        model = Decoder(config)
    stored = _stored_tensors(folder)
    if config.tie_word_embeddings and _HEAD in stored:
        _check_tied_head(stored)
        del stored[_HEAD]
    _check_tensors(folder, stored, {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()})
    tensors = _read_tensors(stored, torch.device(device), dtype)
    if shard is None or copy_share is None:
        model.load_state_dict(dict(tensors), assign=True)
        return model
    shard(model)
    model.to_empty(device=device)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in tensors:
            copy_share(parameters[name], tensor)
    return model


def save_decoder(
    model: Decoder, path: Path | str, source: Path | str | None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Writes a folder that transformers' AutoModelForCausalLM and `load_decoder` read; see `save_weights`."""
    save_weights(plain_state_dict(model), model.config, path, source, max_shard_bytes)


def save_weights(
    state: Mapping[str, Tensor],
    config: DecoderConfig,
    path: Path | str,
    source: Path | str | None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes weights under plain names, config.json, and what `source` has of tokenizer and generation files.

    Every file is written under a temporary name and renamed, the weights last, so that no reader meets half a file.

    Args:
        state: full (unsharded) tensors as `plain_state_dict` names them, saved in the dtype they have.
        path: folder, made if need be; weights that are there are replaced.
        source: folder the model came from, or a fresh model's tokenizer folder; None copies nothing.
        max_shard_bytes: above it, the weights stand in several files of at most this size with an index; from a GPU,
            the tensors of one file are copied to the host at a time. A larger tensor has a file of its own.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    token_ids = _token_ids(Path(source)) if source is not None else {}
    if source is not None:
        _copy_companions(Path(source), folder)
    _write_json(folder / "config.json", to_huggingface(config, state[_EMBEDDING].dtype, token_ids))
    shards = _shards(state, max_shard_bytes)
    for file, names in shards.items():
        _write_then_rename(folder / file, partial(_save_tensors, {name: state[name] for name in names}))
        # safetensors makes its files readable by their owner only, whatever the umask.
        shutil.copymode(folder / "config.json", folder / file)
    if len(shards) > 1:
        weight_map = {name: file for file, names in shards.items() for name in names}
        total = sum(tensor.nbytes for tensor in state.values())
        _write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
    written = {*shards, *([_INDEX] if len(shards) > 1 else [])}
    for stale in {_WEIGHTS, _INDEX, *(file.name for file in folder.glob(_SHARDS))} - written:
        (folder / stale).unlink(missing_ok=True)


def plain_state_dict(model: nn.Module) -> dict[str, Tensor]:
    """The state dict under the names of an unwrapped decoder; the tensors are the model's own, not copies.

    PEFT's LoRA renames a wrapped weight `q_proj.weight` to `q_proj.base_layer.weight` and adds `q_proj.lora_A...`
    beside it. This mapping, the only one, undoes the renaming and leaves the adapter out.
    """
    plain = {}
    for name, tensor in model.state_dict().items():
        parts = name.split(".")
        if not any(part.startswith("lora_") for part in parts):
            plain[".".join(part for part in parts if part != "base_layer")] = tensor
    return plain


def _shards(state: Mapping[str, Tensor], max_bytes: int) -> dict[str, list[str]]:
    """File names, and the tensors of each: in the order of the state, filled up to the limit."""
    groups: list[list[str]] = [[]]
    size = 0
    for name, tensor in state.items():
        if groups[-1] and size + tensor.nbytes > max_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += tensor.nbytes
    if len(groups) == 1:
        return {_WEIGHTS: groups[0]}
    return {f"model-{n:05d}-of-{len(groups):05d}.safetensors": group for n, group in enumerate(groups, start=1)}


def _save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    on_host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(on_host, file, metadata={"format": "pt"})


def _stored_tensors(folder: Path) -> dict[str, _StoredTensor]:
    weight_map = _weight_map(folder)
    stored = {}
    for file in [folder / name for name in sorted(set(weight_map.values()))] or [folder / _WEIGHTS]:
        with _open(file) as weights:
            for name in weights.keys():  # noqa: SIM118 (not a mapping)
                if not name.endswith("rotary_emb.inv_freq"):  # old Llama checkpoints store what RoPE recomputes
                    header = weights.get_slice(name)
                    stored[name] = _StoredTensor(file, tuple(header.get_shape()), header.get_dtype())
    for name, shard in weight_map.items():
        if name not in stored and not name.endswith("rotary_emb.inv_freq"):
            raise UserError(f"{folder / shard} has no tensor {name}, which {_INDEX} says it holds")
    return stored


def _weight_map(folder: Path) -> dict[str, str]:
    """File of each tensor by the index; empty where there is one file."""
    if (folder / _WEIGHTS).is_file():
        return {}
    index = folder / _INDEX
    if not index.is_file():
        raise UserError(f"{folder} holds neither {_WEIGHTS} nor {_INDEX}; other weight formats are not read")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise UserError(f"{index}: the key 'weight_map' is missing or empty")
    for name, file in weight_map.items():
        if not isinstance(file, str):
            raise UserError(f"{index}: weight_map: {name}: {file!r} is no name of a file")
    return weight_map


def _open(file: Path) -> Any:
    if not file.is_file():
        raise UserError(f"{file} does not exist, though {_INDEX} lists it")
    try:
        return safe_open(file, framework="pt")
    except SafetensorError as error:
        raise UserError(f"{file} is truncated or is no safetensors file ({error}); fetch it again") from None


def _check_tied_head(stored: Mapping[str, _StoredTensor]) -> None:
    """A file may repeat the embedding as head; a head of its own would be lost by tying it."""
    if _EMBEDDING not in stored:
        return
    with _open(stored[_HEAD].file) as head_file, _open(stored[_EMBEDDING].file) as embedding_file:
        if not torch.equal(head_file.get_tensor(_HEAD), embedding_file.get_tensor(_EMBEDDING)):
            raise UserError(
                f"{stored[_HEAD].file}: {_HEAD} differs from {_EMBEDDING}, but config.json has"
                " tie_word_embeddings: true; set it to false"
            )


def _check_tensors(folder: Path, stored: Mapping[str, _StoredTensor], expected: Mapping[str, tuple[int, ...]]) -> None:
    problems = [f"{name} is missing" for name in expected if name not in stored]
    for name, found in stored.items():
        if name not in expected:
            problems.append(f"{name} in {found.file.name} is unexpected")
        elif found.shape != expected[name]:
            problems.append(
                f"{name} in {found.file.name} has shape {list(found.shape)}, config.json says {list(expected[name])}"
            )
        elif found.dtype not in _FLOAT_TYPES:
            problems.append(
                f"{name} in {found.file.name} has dtype {found.dtype}, not one of {', '.join(_FLOAT_TYPES)}"
            )
    if problems:
        more = f"; and {len(problems) - _SHOWN_PROBLEMS} more" if len(problems) > _SHOWN_PROBLEMS else ""
        raise UserError(f"{folder}: the weights do not fit: {'; '.join(problems[:_SHOWN_PROBLEMS])}{more}")


def _read_tensors(
    stored: Mapping[str, _StoredTensor], device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in stored.items():
        # Opened anew for each: what was read of a mapped file counts as memory of the process until it is closed.
        with _open(tensor.file) as weights:
            # A copy, because get_tensor may hand out a view of the mapped file, which can change under us.
            yield name, weights.get_tensor(name).to(device, dtype, copy=True)


def _token_ids(source: Path) -> dict[str, Any]:
    """Special token ids for the new config.json; the folder of a fresh model's tokenizer has none."""
    file = source / "config.json"
    return read_json(file) if file.is_file() else {}


def _copy_companions(source: Path, folder: Path) -> None:
    for name in _COMPANIONS:
        if (source / name).is_file():
            _write_then_rename(folder / name, partial(shutil.copyfile, source / name))


def _write_json(file: Path, content: dict[str, Any]) -> None:
    _write_then_rename(file, lambda temporary: temporary.write_text(json.dumps(content, indent=2) + "\n"))


def _write_then_rename(file: Path, write: Callable[[Path], object]) -> None:
    temporary = file.with_name(f".{file.name}.tmp")
    write(temporary)
    os.replace(temporary, file)
