"""Weights as a forward uses them: whole where they are sharded, with the deltas of the adapters that are active."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparrow.models.decoder import Decoder
from sparrow.training.sharding import gathered

OUTSIDE_THE_LAYERS = ("model.embed_tokens", "model.norm", "lm_head")


def switch_adapters(layers: Sequence[Any], on: bool) -> None:
    """Of peft's layers."""
    for layer in layers:
        assert not layer.merged, "peft would take the adapter out again by a subtraction, which rounds"
        layer.enable_adapters(on)


@contextmanager
def adapters_on(layers: Sequence[Any]) -> Iterator[None]:
    """The adapters of these layers of peft are on inside, and off afterwards."""
    switch_adapters(layers, True)
    try:
        yield
    finally:
        switch_adapters(layers, False)


def effective_weight(module: nn.Module) -> Tensor:
    """The weight that the module multiplies with; of a peft layer its base's and the active adapters' deltas."""
    if not hasattr(module, "base_layer"):
        return module.get_parameter("weight")
    adapted: Any = module
    weight: Tensor = adapted.base_layer.weight
    if not adapted.disable_adapters and not adapted.merged:
        for adapter in adapted.active_adapters:
            weight = weight + adapted.get_delta_weight(adapter)
    return weight


@torch.no_grad()
def copy_weights(target: Decoder, source: Decoder) -> None:
    """Fills a plain decoder, layer by layer; collective where the source is sharded."""
    with gathered(source):
        for name in OUTSIDE_THE_LAYERS:
            if name != "lm_head" or target.lm_head is not None:
                _copy(target.get_submodule(name), source.get_submodule(name))
    for layer, its_source in zip(target.model.layers, source.model.layers, strict=True):
        with gathered(its_source):
            _copy(layer, its_source)


def _copy(target: nn.Module, source: nn.Module) -> None:
    for name, parameter in target.named_parameters():
        path, _, kind = name.rpartition(".")
        module: Any = source.get_submodule(path)
        parameter.copy_(effective_weight(module) if kind == "weight" else module.bias)
