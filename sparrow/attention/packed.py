"""Causal attention over packed documents: the dense forward of training, of the log-prob pass and of prefill.

Axes: T packed tokens, H query heads, K KV heads, D head dim, N documents, L longest document.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def for_sdpa(q_NHLD: Tensor, k_NKLD: Tensor, v_NKLD: Tensor, masked: bool = False) -> tuple[Tensor, Tensor, bool]:
    """Keys and values as SDPA is to have them, and its `enable_gqa`.

    In fp32 or with a mask no kernel on CUDA but the one that holds all scores takes grouped heads, so they are repeated
    there.
    """
    group = q_NHLD.shape[1] // k_NKLD.shape[1]
    if group > 1 and q_NHLD.is_cuda and (masked or q_NHLD.dtype == torch.float32):
        return k_NKLD.repeat_interleave(group, 1), v_NKLD.repeat_interleave(group, 1), False
    return k_NKLD, v_NKLD, group > 1


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
        k, v, grouped = for_sdpa(q, k, v)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1)[self.cell_T]

    def _pad(self, x_TXD: Tensor) -> Tensor:
        """[T, X, D] to [N, L, X, D]."""
        if len(set(self.lengths)) == 1:
            return x_TXD.unflatten(0, (len(self.lengths), self.longest))
        grid = x_TXD.new_zeros(len(self.lengths) * self.longest, *x_TXD.shape[1:])
        return grid.index_copy(0, self.cell_T, x_TXD).unflatten(0, (len(self.lengths), self.longest))
