"""An adapter of peft, as the distiller exports it, in a decoder: beside the weights, or merged into them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from sparrow.errors import UserError
from sparrow.models.adapted import switch_adapters
from sparrow.models.decoder import Decoder

_WEIGHTS, _PREFIX = "adapter_model.safetensors", "base_model.model."
_LAYERS = "model.layers."
_UNSUPPORTED = (
    "use_dora", "modules_to_save", "trainable_token_indices", "target_parameters", "lora_bias", "layer_replication",
    "alora_invocation_tokens",
)  # fmt: skip


@torch.no_grad()
def merge_adapter(model: Decoder, folder: Path) -> None:
    """Adds the deltas of a LoRA adapter to the weights, in place; they are summed in fp32 and rounded once.

    Raises:
        UserError: as `_attach`.
    """
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    for name, layer in _attach(model, folder).items():
        base = layer.get_base_layer()
        base.weight.copy_(base.weight.float() + layer.get_delta_weight("default"))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, base)
    model.requires_grad_(True)
    assert {name: parameter.dtype for name, parameter in model.named_parameters()} == dtypes


def attach_adapter(model: Decoder, folder: Path) -> list[Any]:
    """Puts a LoRA adapter beside the weights, switched off, and returns peft's layers for `adapters_on`.

    Raises:
        UserError: as `_attach`, or it adapts more than the decoder's layers.
    """
    layers = _attach(model, folder)
    for name in layers:
        if not name.startswith(_LAYERS):
            raise UserError(
                f"adapter: {folder} adapts {name}; only modules under {_LAYERS}* can have one that is on in rollouts "
                "alone: embedding and head are the same for both policies"
            )
    model.eval()  # its dropout was for its training
    switch_adapters(list(layers.values()), False)
    return list(layers.values())


def fill_adapter(model: Decoder, folder: Path, rank: int, alpha: int) -> None:
    """Copies a folder's tensors into the LoRA adapter of this rank and alpha that the model has.

    Raises:
        UserError: as `_attach`, or of another rank or alpha.
    """
    check_beginning(folder, rank, alpha)
    _fill(model, folder, _tensors(folder))


def check_beginning(folder: Path, rank: int, alpha: int) -> None:
    """What shows without a model of whether an adapter of this rank and alpha can begin with a folder's.

    Raises:
        UserError: it cannot.
    """
    config = _config(folder)
    for key, name, found, wanted in (("r", "rank", config.r, rank), ("lora_alpha", "alpha", config.lora_alpha, alpha)):
        if found != wanted:
            raise UserError(f"adapter: {folder} has {key} {found}, the adapter that it is to begin has {name} {wanted}")
    for key in ("use_rslora", "rank_pattern", "alpha_pattern"):
        if getattr(config, key):
            raise UserError(f"adapter: {folder}: {key} is not supported for one that is trained on")


@torch.no_grad()
def _attach(model: Decoder, folder: Path) -> dict[str, Any]:
    """Peft's layers by name, with the folder's tensors, in fp32 as the distiller trains them.

    Raises:
        UserError: no adapter in the folder, another kind than LoRA, or one for another model; says which module.
    """
    # Seconds of import that only runs with an adapter should pay for.
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    config = _config(folder)
    tensors = _tensors(folder)
    _check_targets(folder, config.target_modules, model)
    try:
        inject_adapter_in_model(config, model)
    except (ValueError, TypeError) as error:  # none of its modules is one of the model's, or its rank is no number
        raise UserError(f"adapter: {folder} does not fit the model: {error}") from error
    _fill(model, folder, tensors)
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}


def _fill(model: Decoder, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    expected = {name: p for name, p in model.named_parameters() if "lora_" in name}
    _check(folder, tensors, {name.replace(".default.", "."): tuple(p.shape) for name, p in expected.items()})
    for name, parameter in expected.items():
        parameter.data = tensors[name.replace(".default.", ".")].to(parameter.device, torch.float32)


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
    for key in _UNSUPPORTED:
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


def _check_targets(folder: Path, targets: Any, model: Decoder) -> None:
    """Peft ignores those of a list that the model lacks."""
    if not targets:  # peft would look for a model it knows
        raise UserError(f"adapter: {folder} has no target_modules")
    if isinstance(targets, str):  # a pattern; that it fits nothing is peft's to say
        return
    modules = {path.rpartition(".")[2] for path, _ in model.named_modules()}
    for target in sorted(targets):
        if target.rpartition(".")[2] not in modules:
            there_are = ", ".join(sorted(name for name in modules if name.endswith("_proj")))
            raise UserError(f"adapter: {folder} has the target_modules {target!r}, the model has {there_are}")


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
