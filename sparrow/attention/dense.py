"""Which implementation of dense causal attention trains: by name from YAML, `auto` by device and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

from sparrow.attention.packed import PackedCausal
from sparrow.attention.packed_flex import PackedFlex
from sparrow.errors import UserError

DenseBackend = Literal["auto", "sdpa", "flex"]
BACKENDS = get_args(DenseBackend)
SMALLEST_HEAD = 16  # of FlexAttention's kernels


class DenseAttention:
    """Causal attention within each of the packed documents, by one of two implementations.

    Args:
        name: `sdpa` pads documents to the longest, on any device; `flex` packs them, on CUDA. `auto` takes flex on CUDA
            in half precision. In fp32 the blocks of flex's backward are tiny.
        lengths: tokens of each document, in packing order.

    Raises:
        UserError: `flex` on the CPU, where it has no backward.
    """

    def __init__(self, name: DenseBackend, lengths: Sequence[int], device: torch.device) -> None:
        if name == "flex" and device.type != "cuda":
            raise UserError(f"attention: flex needs a CUDA device to train on, this run is on {device}; use auto")
        self.name, self.lengths, self.device = name, lengths, device
        self.chosen: PackedCausal | PackedFlex | None = None

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """[T, H, D]; the first layer's queries decide, and what all layers share is made once."""
        if self.chosen is None:
            self.chosen = (PackedFlex if self._flex(q_THD) else PackedCausal)(self.lengths, self.device)
        return self.chosen(layer, q_THD, k_TKD, v_TKD)

    def _flex(self, q_THD: Tensor) -> bool:
        return takes_flex(self.name, q_THD.is_cuda, q_THD.dtype, q_THD.shape[-1])


def takes_flex(name: DenseBackend, on_cuda: bool, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether that name is FlexAttention there."""
    if name != "auto":
        return name == "flex"
    return on_cuda and dtype in (torch.bfloat16, torch.float16) and head_dim >= SMALLEST_HEAD
