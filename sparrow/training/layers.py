"""How the trainer runs the decoder's layers: activations recomputed or offloaded, halves compiled.

Axes: T packed tokens, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from sparrow.models.decoder import Decoder
from sparrow.protocols import Attention


def prepare_layers(model: Decoder, recompute: bool, offload: bool, compiled: bool) -> None:
    """Changes how each layer runs, in place; values and gradients stay what they are, but for rounding when compiled.

    Args:
        recompute: keep, for the backward, the layer's input and what attention needs, and recompute the projections,
            norms and the MLP. Attention, most of a long sequence's work, is not done twice.
        offload: keep the layer's input alone, in the host's memory, and recompute the whole layer.
        compiled: torch.compile the halves before and after attention, once for all layers and lengths.
    """
    layers: Any = model.model.layers
    for layer in layers:
        before, after = layer.before_attention, layer.after_attention
        if compiled:
            # The attention between them is an object of the micro-batch; as one region they would compile for each.
            before, after = (torch.compile(half, dynamic=True) for half in (before, after))
        if offload:
            layer.forward = partial(_offloaded, layer.forward)
        elif recompute:
            before, after = (partial(_recomputed, half) for half in (before, after))
        layer.before_attention, layer.after_attention = before, after


def _recomputed(work: Callable[..., Any], *tensors: Tensor) -> Any:
    return checkpoint(work, *tensors, use_reentrant=False, preserve_rng_state=False)


def _offloaded(
    forward: Callable[..., Tensor], hidden_TE: Tensor, cos: Tensor, sin: Tensor, attention: Attention
) -> Tensor:
    # The rotary factors are the same for all layers: enclosed, they stay on the device, and are not copied for each.
    with save_on_cpu(pin_memory=hidden_TE.is_cuda):
        output_TE: Tensor = _recomputed(lambda hidden: forward(hidden, cos, sin, attention), hidden_TE)
    return output_TE
