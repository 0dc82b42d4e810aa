"""Causal attention over packed documents: the dense forward of training, of the log-prob pass and of prefill.

Axes: T packed tokens, H query heads, K KV heads, D head dim, N documents, L longest document.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class PackedCausal:
    """Each document attends to itself only. Documents are padded to the longest and go through one SDPA call.

    Padding stands behind the tokens of a document, where a causal mask never looks, so it needs no mask of its own.

    Args:
        lengths: tokens of each document, in packing order; they sum to T.
        device: where the tensors live.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.lengths = list(lengths)
        lengths_N = torch.tensor(self.lengths, device=device)
        starts_N = lengths_N.cumsum(0) - lengths_N
        document_T = torch.repeat_interleave(torch.arange(len(self.lengths), device=device), lengths_N)
        self.longest = max(self.lengths)
        # Flat index of each token in the padded [N, L] grid.
        self.cell_T = document_T * self.longest + torch.arange(len(document_T), device=device) - starts_N[document_T]
        self.positions_T = torch.arange(len(document_T), device=device) - starts_N[document_T]

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        """[T, H, D] queries and [T, K, D] keys and values to the attention output [T, H, D]."""
        q, k, v = (self._pad(x).transpose(1, 2) for x in (q_THD, k_TKD, v_TKD))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2).flatten(0, 1)[self.cell_T]

    def _pad(self, x_TXD: Tensor) -> Tensor:
        """[T, X, D] to [N, L, X, D]."""
        if len(set(self.lengths)) == 1:
            return x_TXD.unflatten(0, (len(self.lengths), self.longest))
        grid = x_TXD.new_zeros(len(self.lengths) * self.longest, *x_TXD.shape[1:])
        return grid.index_copy(0, self.cell_T, x_TXD).unflatten(0, (len(self.lengths), self.longest))
