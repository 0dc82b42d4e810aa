"""Merging an adapter of peft, as the distiller exports it, into a decoder's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from sparrow.errors import UserError
from sparrow.models.decoder import Decoder

_WEIGHTS, _PREFIX = "adapter_model.safetensors", "base_model.model."


@torch.no_grad()
def merge_adapter(model: Decoder, folder: Path) -> None:
    """Adds the deltas of a LoRA adapter to the weights, in place; they are summed in fp32 and rounded once.

    Raises:
        UserError: no adapter in the folder, another kind than LoRA, or one for another model; says which module.
    """
    # Seconds of import that only runs with an adapter should pay for.
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    config = _config(folder)
    tensors = _tensors(folder)
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    try:
        inject_adapter_in_model(config, model)
    except ValueError as error:  # none of its modules is one of the model's
        raise UserError(f"adapter: {folder} does not fit the model: {error}") from error
    expected = {name: p for name, p in model.named_parameters() if "lora_" in name}
    _check(folder, tensors, {name.replace(".default.", "."): tuple(p.shape) for name, p in expected.items()})
    for name, parameter in expected.items():
        parameter.data = tensors[name.replace(".default.", ".")].to(parameter.device, torch.float32)
    layers: list[tuple[str, Any]] = [(name, m) for name, m in model.named_modules() if isinstance(m, LoraLayer)]
    for name, layer in layers:
        base = layer.get_base_layer()
        base.weight.copy_(base.weight.float() + layer.get_delta_weight("default"))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, base)
    model.requires_grad_(True)
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == dtypes


def _config(folder: Path) -> Any:
    from peft import LoraConfig, PeftConfig

    if not (folder / "adapter_config.json").is_file():
        raise UserError(f"adapter: {folder} holds no adapter_config.json: it is no folder of peft")
    try:
        config = PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"adapter: {folder / 'adapter_config.json'} cannot be read: {error}") from error
    if not isinstance(config, LoraConfig):
        raise UserError(f"adapter: {folder} is a {config.peft_type}, not LoRA")
    for key in ("use_dora", "modules_to_save", "trainable_token_indices", "target_parameters"):
        if getattr(config, key, None):
            raise UserError(f"adapter: {folder}: {key} is not supported: only what adds to the weights of layers")
    if config.bias != "none":
        raise UserError(f"adapter: {folder}: bias {config.bias!r} is not supported, only 'none'")
    return config


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    file = folder / _WEIGHTS
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise UserError(f"adapter: {file} cannot be read: {error}") from error
    return {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items()}


def _check(folder: Path, tensors: dict[str, torch.Tensor], expected: dict[str, tuple[int, ...]]) -> None:
    problems = [f"{name} is missing" for name in expected if name not in tensors]
    problems += [f"{name} is no module of the model" for name in tensors if name not in expected]
    problems += [
        f"{name} has shape {list(tensor.shape)}, the model wants {list(expected[name])}"
        for name, tensor in tensors.items()
        if name in expected and tuple(tensor.shape) != expected[name]
    ]
    if problems:
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise UserError(f"adapter: {folder} does not fit the model: {problems[0]}{more}")
