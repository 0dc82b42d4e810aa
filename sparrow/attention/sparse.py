"""Which implementation of sparse attention trains: page lists where their kernels run, a mask elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparrow.attention.backend import runs_kernels
from sparrow.attention.masked import MaskedSparse
from sparrow.attention.pattern import SparsePattern
from sparrow.protocols import Attention


class SparseAttention:
    """The sparsity of decode for whole packed documents, differentiable.

    Args:
        lengths, prompt_lengths: tokens of each packed document and how many of them are its prompt.
        pattern: the rule of selection that the rollout used.
    """

    def __init__(
        self, lengths: Sequence[int], prompt_lengths: Sequence[int], pattern: SparsePattern, device: torch.device
    ) -> None:
        self.lengths, self.prompt_lengths, self.pattern, self.device = lengths, prompt_lengths, pattern, device
        self.chosen: Attention | None = None

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """[T, H, D]; the first layer's queries decide, and what all layers share is made once."""
        if self.chosen is None:
            self.chosen = self._choose(q_THD)
        return self.chosen(layer, q_THD, k_TKD, v_TKD)

    def _choose(self, q_THD: Tensor) -> Attention:
        if not runs_kernels(q_THD.device, q_THD.dtype, self.pattern.page_size, q_THD.shape[-1]):
            return MaskedSparse(self.lengths, self.prompt_lengths, self.pattern)
        # Imported here, as Triton is not installed where there is no GPU.
        from sparrow.attention.tiled import TiledSparse

        return TiledSparse(self.lengths, self.prompt_lengths, self.pattern, self.device)
